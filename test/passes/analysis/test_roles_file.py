"""Roles from a file: the meaning of each kind of entry, and errors by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import main_function, parse
from alpa.dialects.attributes import read_arguments, read_results
from alpa.passes.analysis.roles_file import RolesError, RolesFile

# As JAX writes it with debug information.
PROGRAM = """\
func.func public @main(
    %w: tensor<3xf32> loc("state['w']"), %b: tensor<3xf32> loc("state['b']"),
    %x: tensor<3x4xf32> loc("batch['x']"), %key: tensor<2xui32>)
    -> (tensor<3xf32> {jax.result_info = "result[0]['w']"},
        tensor<3xf32> {jax.result_info = "result[0]['b']"},
        tensor<f32> {jax.result_info = "result[1]"}) {
  %0 = stablehlo.constant dense<0.0> : tensor<f32>
  return %w, %b, %0 : tensor<3xf32>, tensor<3xf32>, tensor<f32>
}
"""


def applied(text: str, program: str = PROGRAM) -> tuple[list[str | None], list[str]]:
    module = parse(program)
    RolesFile.parse(text, "roles.toml").apply(module)
    assert module.operation.verify()
    function = main_function(module)
    return (
        [argument.role for argument in read_arguments(function)],
        [str(result.role) for result in read_results(function)],
    )


@pytest.mark.parametrize(
    "text",
    [
        """
        [arguments]
        "state['w']" = "state"
        "state['b']" = "state"
        "batch['x']" = { role = "batch", batch_dim = 1 }
        3 = "key"
        [results]
        "result[0]['w']" = "state:state['w']"
        1 = "state:1"
        "result[1]" = "mean"
        """,
        """
        [results]
        "result[0]*" = "state:0-1"
        2 = "mean"
        [arguments]
        "state*" = "state"
        2 = { batch_dim = 1, role = "batch" }
        3-3 = "key"
        """,
    ],
)
def test_names_numbers_and_ranges_say_the_same(text: str) -> None:
    arguments, results = applied(text)
    assert arguments == ["state", "state", "batch", "key"]
    assert results == ["state:0", "state:1", "mean"]


def test_roles_that_the_file_leaves_out_stay() -> None:
    given = PROGRAM.replace(
        "%w: tensor<3xf32>", '%w: tensor<3xf32> {alpa.role = "state", jax.buffer_donor = true}'
    )
    module = parse(given)
    RolesFile.parse('[arguments]\n2 = "batch"', "roles.toml").apply(module)
    first, _, third, _ = read_arguments(main_function(module))
    assert (first.role, first.donor) == ("state", True)
    assert (third.role, third.batch_dim) == ("batch", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[arguments\n", "1: error: not valid TOML: "),
        ("x = 1", "1: error: 'x' is neither [arguments] nor [results]"),
        ('[args]\n0 = "state"', "1: error: 'args' is neither"),
        ('\n[arguments]\n0 = "weights"', "3: error: the role is 'weights'; expected batch, "),
        ('[arguments]\n9 = "state"', "2: error: there is no argument 9; @main has 4 arguments"),
        ('[arguments]\n2-1 = "state"', "2: error: 2-1 is no range"),
        ('[arguments]\nx = "state"', "2: error: no argument is called x; there are state['w'], "),
        ('[arguments]\na.b = "state"', "2: error: no argument is called a"),
        ('[arguments]\n0-1 = "state"\n1 = "key"', "3: error: argument 1 has a role from line 2"),
        ("[arguments]\n0 = 3", '2: error: expected a role such as "state", or { role = '),
        ('[arguments]\n0 = { role = "state", dim = 1 }', "2: error: expected a role such as"),
        ('[arguments]\n0 = { role = "batch", batch_dim = 1 }', "2: error: argument 0 is tensor<3"),
        ('[arguments]\n0 = { role = "state", batch_dim = 0 }', "2: error: batch_dim belongs to"),
        ('[arguments]\n0 = { role = "batch", batch_dim = "0" }', "2: error: batch_dim is '0'"),
        ('[results]\n2 = "average"', "2: error: the role is 'average'; expected concat:<dim>, "),
        ("[results]\n2 = 1", "2: error: the role is 1; expected a text"),
        (
            '[results]\n2 = "concat:0"',
            "2: error: result 2 is tensor<f32>, which has no dimension 0",
        ),
        (
            '[results]\n2 = "state:0"',
            "2: error: result 2 is tensor<f32> and cannot be the new value",
        ),
        ('[results]\n0-1 = "state:0"', "2: error: 0-1 is 2 result(s), 0 is 1 argument(s)"),
        ('[results]\n0 = "state:7"', "2: error: there is no argument 7"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(RolesError) as error:
        applied(text)
    assert str(error.value).startswith(f"roles.toml:{message}")


def test_a_program_without_names_asks_for_numbers() -> None:
    nameless = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    with pytest.raises(RolesError, match="the program has no names of its arguments; use numbers"):
        applied('[arguments]\nx = "batch"', nameless)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RolesError, match=r"none.toml: error: No such file"):
        RolesFile.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(RolesError, match="UTF-8"):
        RolesFile.read(tmp_path / "bad.toml")
