"""`alpa.tools.check_plan`: plans compared with XLA's programs, and differences to find."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import ir, parse, walk
from alpa.passes.plan.predicted_collectives import Collective
from alpa.runtime.ahead_of_time.compilation import missing_packages, without_notices
from alpa.runtime.ahead_of_time.module_check import ModuleCheck
from alpa.tools import check_plan
from alpa.tools.check_plan import Tolerances, check

PARAMETERS = 4 * (32 * 64 + 64 + 64 * 16)


@cache
def data_parallel(cluster: str = "cpu") -> str:
    """A training step of an MLP, its batch on all four devices of one mesh."""

    def step(w0: jax.Array, b0: jax.Array, w1: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w0: jax.Array, b0: jax.Array, w1: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w0 + b0) @ w1) ** 2)

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(w0, b0, w1)
        new = (w - 0.1 * g for w, g in zip((w0, b0, w1), gradients, strict=True))
        return (*new, value)

    shapes = [(32, 64), (64,), (64, 16), (64, 32)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*arguments).as_text()
    options = f"cluster={cluster}:1x4 num-layers=1 num-stages=1 mesh-rank=1 intra=data-parallel"
    return str(passes.run(text, f"alpa{{{options}}},export-stages{{merge=false}}"))


@cache
def checks() -> tuple[ModuleCheck, ...]:
    return tuple(check(parse(data_parallel()), jax.devices()))


def test_data_parallelism_sums_gradients_and_the_loss_and_nothing_else() -> None:
    by_part = {c.name.rpartition(".")[2]: c for c in checks()}
    for found in (by_part["backward"].collectives, by_part["backward"].real.collectives):
        assert sum(c.payload for c in found) == PARAMETERS
        assert {(c.kind, c.devices) for c in found} == {("all-reduce", 4)}
    assert by_part["forward"].payloads == {"all-reduce": (4, 4)}
    assert by_part["update"].payloads == {}


def test_memory_is_within_the_tolerance_and_exact_outside_temporaries() -> None:
    for c in checks():
        assert Tolerances().exceeded(c) == []
        assert c.memory.arguments == c.real.arguments
        assert c.memory.aliased == c.real.aliased
        assert abs(c.memory.results - c.real.results) <= 8 * 8  # a table of pointers
    update = next(c for c in checks() if c.name.endswith("update"))
    assert update.memory.aliased == PARAMETERS


def test_a_plan_that_does_not_say_what_happens_differs() -> None:
    wrong = parse(data_parallel())
    for fragment in wrong.body.operations[1].regions[0].blocks[0].operations:
        if "backward" in str(fragment.attributes.get("alpa.module", "")):
            for op in walk(fragment.regions[0].blocks[0]):
                _claim_replicated(op)
    found = {
        c.name.rpartition(".")[2]: Tolerances().exceeded(c) for c in check(wrong, jax.devices())
    }
    assert found["backward"] == ["all-gather", "collectives", "memory"]
    assert found["forward"] == found["update"] == []


def _claim_replicated(op: ir.OpView) -> None:
    sharding = op.attributes.get("sdy.sharding")
    if sharding is not None:
        text = str(sharding).replace('{"axis0"}', "{}")
        op.attributes["sdy.sharding"] = ir.Attribute.parse(text, op.context)


@pytest.mark.parametrize(
    ("extra", "wrong"),
    [
        ((), []),
        (("all-reduce", 900), []),
        (("all-reduce", 9000), ["all-reduce", "collectives"]),
        (("all-to-all", 9000), ["all-to-all", "collectives"]),
    ],
)
def test_tolerances(extra: tuple[str, int], wrong: list[str]) -> None:
    (backward,) = (c for c in checks() if c.name.endswith("backward"))
    if extra:
        kind, size = extra
        more = Collective(kind=kind, axes=("axis0",), devices=4, bytes=size, count=1)  # type: ignore[arg-type]
        backward = replace(backward, collectives=(*backward.collectives, more))
    assert Tolerances().exceeded(backward) == wrong
    fuller = replace(backward.memory, temporaries=backward.real.peak)
    assert fuller.peak > 1.2 * backward.real.peak
    assert Tolerances().exceeded(replace(backward, memory=fuller)) == [*wrong, "memory"]
    wide = Tolerances(memory=0.9, collectives=9)
    assert wide.exceeded(replace(backward, memory=fuller)) == []


def test_reduce_scatters_loops_and_exchanges_of_one_module() -> None:
    """A plan written by hand whose every collective kind XLA confirms."""
    found = check(parse(HAND_MADE), jax.devices())
    assert [c.payloads for c in found] == [
        {
            "all-gather": (32 * 32 * 4, 32 * 32 * 4),
            "all-reduce": (6 * 32 * 32 * 4, 6 * 32 * 32 * 4),
            "all-to-all": (32 * 32, 32 * 32),
            "reduce-scatter": (32 * 32 * 4, 32 * 32 * 4),
        }
    ]


def _layout(*dims: str) -> str:
    return f"<@mesh_0, [{', '.join(f'{{{dim}}}' for dim in dims)}]>"


def _on(*dims: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding_per_value<[{_layout(*dims)}]>}}"


X, T = '"axis0"', "tensor<32x32xf32>"
ROWS, COLUMNS, WHOLE = (X, ""), ("", X), ("", "")
MESH_TENSOR = f'!mpmd.mesh_tensor<"mesh_0", {T}, sharding={_layout(*ROWS)}>'
SCALAR = "{sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>}"
HAND_MADE = f"""
sdy.mesh @mesh_0 = <["axis0"=4]>
func.func public @main(%a: {MESH_TENSOR}) -> {MESH_TENSOR} attributes {{
    topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
    alpa.meshes = [{{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>,
                    logical_shape = array<i64: 4>}}],
    alpa.plan = {{num_micro_batches = 1 : i64, schedule = "gpipe", cluster = "cpu:1x4",
      predicted_step_seconds = 1.0 : f64, predicted_peak_bytes = array<i64: 0>}}}} {{
  %f = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%a)
      {{alpa.part = "forward"}} (%x: {T}) {{
    %t = stablehlo.tanh %x {_on(*ROWS)} : {T}
    %columns = sdy.sharding_constraint %t {_layout(*COLUMNS)} : {T}
    %d = stablehlo.dot_general %columns, %t, contracting_dims = [1] x [0] {_on(*WHOLE)}
      : ({T}, {T}) -> {T}
    %scattered = sdy.sharding_constraint %d {_layout(*ROWS)} : {T}
    %e = stablehlo.exponential %scattered {_on(*ROWS)} : {T}
    %gathered = sdy.sharding_constraint %e {_layout(*WHOLE)} : {T}
    %zero = stablehlo.constant {SCALAR} dense<0> : tensor<i32>
    %one = stablehlo.constant {SCALAR} dense<1> : tensor<i32>
    %six = stablehlo.constant {SCALAR} dense<6> : tensor<i32>
    %i, %l = stablehlo.while(%j = %zero, %s = %gathered) : tensor<i32>, {T}
      attributes {{sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>, {_layout(*WHOLE)}]>}}
    cond {{
      %c = stablehlo.compare LT, %j, %six {SCALAR} : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    }} do {{
      %left = sdy.sharding_constraint %s {_layout(*COLUMNS)} : {T}
      %p = stablehlo.dot_general %left, %t, contracting_dims = [1] x [0] {_on(*WHOLE)}
        : ({T}, {T}) -> {T}
      %k = stablehlo.add %j, %one {SCALAR} : tensor<i32>
      stablehlo.return %k, %p : tensor<i32>, {T}
    }}
    %cut = sdy.sharding_constraint %l {_layout(*ROWS)} : {T}
    mpmd.return %cut : {T}
  }} : ({MESH_TENSOR}) -> {MESH_TENSOR}
  func.return %f : {MESH_TENSOR}
}}
"""


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alpa.tools.check_plan", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "planned.mlir"
    path.write_text(data_parallel())
    process = run(path, "--json", "--memory-tolerance", "0.0", "--collectives-tolerance", "0")
    found = json.loads(process.stdout)
    memory = [m["memory"] for m in found["modules"]]
    differs = [m["name"] for m in found["modules"] if m["differs"]]
    exact = all(
        abs(m["predicted"]["peak"] - m["real"]["peak"]) <= check_plan.MEMORY_SLACK for m in memory
    )
    assert found["ok"] == exact == (not differs)
    assert process.returncode == (0 if exact else 1)
    said = without_notices(process.stderr)
    assert [line.split()[0] for line in said] == [f"@{n}" for n in differs]
    backward = next(m for m in found["modules"] if m["name"].endswith("backward"))
    assert backward["payload_bytes"]["all-reduce"] == {"predicted": PARAMETERS, "real": PARAMETERS}


@pytest.mark.skipif(bool(missing_packages()), reason=f"needs {' and '.join(missing_packages())}")
@pytest.mark.slow
def test_a_plan_for_gpus_is_compiled_for_them(tmp_path: Path) -> None:
    path = tmp_path / "planned.mlir"
    path.write_text(data_parallel("v100-16gb"))
    process = run(path, "--json", "--memory-tolerance", "0.0")
    modules = {m["name"].rpartition(".")[2]: m for m in json.loads(process.stdout)["modules"]}
    for module in modules.values():
        memory = module["memory"]
        assert memory["predicted"]["arguments"] == memory["real"]["arguments"]
    reduced = modules["backward"]["payload_bytes"]["all-reduce"]
    assert reduced == {"predicted": PARAMETERS, "real": PARAMETERS}
    refused = run(path, "--default-schedule")
    assert refused.returncode == 1
    assert "the plan is for Tesla V100-SXM2-16GB; leave it out" in refused.stderr


def test_a_program_without_a_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.mlir"
    path.write_text("func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n  return %x : tensor<4xf32>\n}")  # fmt: skip # noqa: E501
    assert check_plan.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_the_table_names_what_differs() -> None:
    (backward,) = (c for c in checks() if c.name.endswith("backward"))
    more = Collective(kind="all-to-all", axes=("axis0",), devices=4, bytes=90000, count=1)
    lines = check_plan.table([replace(backward, collectives=(more,))], Tolerances()).splitlines()
    assert [line.split()[-1] == "DIFFERS" for line in lines[1:5]] == [True, True, True, False]
    assert lines[1].split()[1:5] == ["all-reduce", "0", str(PARAMETERS), "0.000"]
    assert lines[2].split() == ["all-to-all", "90000", "0", "inf", "DIFFERS"]
