"""HLO text and protos are converted to StableHLO; what has no counterpart is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa.dialects import body, main_function
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
