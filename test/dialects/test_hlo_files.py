"""HLO text and protos are converted to StableHLO; what has no counterpart is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa.dialects import body, ir, main_function
from alpa.dialects.hlo_files import HloError, read_hlo


def step(w: Any, x: Any) -> Any:
    values, indices = jax.lax.top_k(jnp.tanh(x @ w), 2)
    return w - 0.1 * (x.T @ x), values, indices, jax.scipy.special.erf(x)


@pytest.fixture(scope="module")
def computation() -> Any:
    lowered = jax.jit(step, donate_argnums=0).lower(jnp.zeros((8, 8)), jnp.zeros((4, 8)))
    return lowered.compiler_ir("hlo")


def message(inner: bytes) -> bytes:
    """A serialised message whose first field, of number 1, is another one."""
    size, length = len(inner), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return b"\x0a" + length + bytes([size]) + inner


def test_text_and_protos_give_the_same_module(computation: Any) -> None:
    module = read_hlo(computation.as_hlo_text().encode())
    names = {op.operation.name for op in body(main_function(module)).operations}
    assert {"stablehlo.tanh", "chlo.top_k", "chlo.erf"} <= names
    assert "mhlo.input_output_alias" in module.operation.attributes
    proto = computation.as_serialized_hlo_module_proto()
    for data in (proto, message(proto), message(message(proto))):
        assert str(read_hlo(data)) == str(module)


@pytest.mark.parametrize("data", [b"", b"abc", b"\x0a\xff\xff\xff", message(b"abc")])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(HloError, match="neither HLO text nor a serialised HLO module"):
        read_hlo(data)


def test_errors_of_text_have_places() -> None:
    with pytest.raises(HloError, match="expects '=' in instruction") as raised:
        read_hlo(b"HloModule x\nENTRY e { broken }")
    assert (raised.value.line, raised.value.column) == (2, 18)


def test_the_smallest_values_are_refused() -> None:
    """MHLO has an attribute for it, which the bindings lose."""
    text = (
        b"HloModule x\nENTRY e { p = f32[8] parameter(0) "
        b"ROOT t = (f32[2], s32[2]) topk(p), k=2, largest=false }"
    )
    with pytest.raises(HloError, match="largest=false"):
        read_hlo(text)
    assert "chlo.top_k" in str(read_hlo(text.replace(b"false", b"true")))


LINES = """HloModule m{aliases}
called {{
  p = f32[4] parameter(0)
  ROOT t = f32[4] tanh(p)
}}
ENTRY main {{
  x = f32[4] parameter(0)
  u = u32[4] parameter(1)
  {ops}
}}
"""


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("fusion", "ROOT y = f32[4] fusion(x), kind=kLoop, calls=called"),
        ("bitcast", "ROOT y = f32[2,2] bitcast(x)"),
        ("copy-start", "s = (f32[4], f32[4], u32[]) copy-start(x)\n ROOT y = f32[4] copy-done(s)"),
        ("rng-get-and-update-state", "ROOT y = u64[2] rng-get-and-update-state(), delta=1"),
        ("stochastic-convert", "ROOT y = s32[4] stochastic-convert(x, u)"),
    ],
)
def test_ops_without_a_counterpart_are_named(name: str, ops: str) -> None:
    """What XLA's bytecode of MHLO holds cannot be read, or is of no registered dialect."""
    text = LINES.format(aliases="", ops=ops).encode()
    with pytest.raises(HloError, match=f"^{name} has no counterpart in StableHLO") as raised:
        read_hlo(text)
    assert (raised.value.line, raised.value.column) == (9, 3)


def test_copies_are_reshapes() -> None:
    text = LINES.format(aliases="", ops="c = f32[4] copy(x)\n ROOT y = f32[4] cosh(c)")
    found = [op.operation.name for op in body(main_function(read_hlo(text.encode()))).operations]
    assert found == ["stablehlo.reshape", "chlo.cosh", "func.return"]


@pytest.mark.parametrize(
    ("aliases", "parameters", "results", "argument", "result"),
    [
        # The elements of tuples are counted.
        ("{1}: (1, {})", "(f32[4], f32[4]), f32[4]", "(f32[4], f32[4]), f32[4]", 2, [2]),
        ("{0}: (0, {1})", "(f32[4], f32[4])", "f32[4]", 1, []),
        ("{1, 0}: (0, {1, 0})", "(f32[4], (f32[4]))", "f32[4], (f32[4])", 1, [1]),
    ],
)
def test_donated_elements_of_tuples(
    aliases: str, parameters: str, results: str, argument: int, result: list[int]
) -> None:
    lines = [f"HloModule m, input_output_alias={{ {aliases} }}", "ENTRY main {"]
    numbers = iter(range(99))

    def parts(types: str) -> list[str]:
        """The types that commas outside of brackets separate."""
        found, depth = [""], 0
        for letter in types:
            depth += (letter in "([") - (letter in ")]")
            if letter == "," and not depth:
                found.append("")
            else:
                found[-1] += letter
        return [it.strip() for it in found]

    def made(type_: str, leaf: str) -> str:
        """A value of a type, each leaf of which is this one."""
        if not type_.startswith("("):
            return leaf
        inner = ", ".join(made(it, leaf) for it in parts(type_[1:-1]))
        name = f"v{next(numbers)}"
        lines.append(f"{name} = {type_} tuple({inner})")
        return name

    for number, type_ in enumerate(parts(parameters)):
        lines.append(f"p{number} = {type_} parameter({number})")
    lines.append("c = f32[4] constant({1, 2, 3, 4})")
    root = made(f"({results})", "c")
    lines[-1] = f"ROOT {lines[-1]}"
    assert lines[-1].startswith(f"ROOT {root}")
    module = read_hlo("\n".join([*lines, "}"]).encode())
    (alias,) = ir.ArrayAttr(module.operation.attributes["mhlo.input_output_alias"])
    entry = ir.DictAttr(alias)
    source = ir.DictAttr(entry["alias"])
    assert ir.IntegerAttr(source["parameter_number"]).value == argument
    assert list(ir.DenseI64ArrayAttr(source["parameter_index"])) == []
    assert list(ir.DenseI64ArrayAttr(entry["output_index"])) == result
