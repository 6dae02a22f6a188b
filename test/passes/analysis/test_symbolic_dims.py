"""Sizes of dimensions, as JAX prints their expressions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export

from alpa.passes.analysis.symbolic_dims import SymbolicDim


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("b", 6),
        ("2*b - 3*c", 6),
        ("b^2 + 1", 37),
        ("- c + b", 4),
        ("floordiv(b, 4) + mod(b, 4)", 3),
        ("max(b, c) * min(b, 3)", 18),
        ("non_negative(c - b)", 0),
    ],
)
def test_expressions(text: str, size: int) -> None:
    assert SymbolicDim("x.shape[0]", text).size({"b": 6, "c": 2}) == size


@pytest.mark.parametrize("text", ["floordiv(b, c - 2)", "mod(b, 0)", "2^b^b", "b^(c - b)"])
def test_sizes_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"divides by 0 with b=6|the exponent -?\d+ is not between"
    ):
        SymbolicDim("x.shape[0]", text).size({"b": 6, "c": 2})


def test_the_names_are_not_those_of_functions() -> None:
    assert SymbolicDim("x.shape[0]", "floordiv(b, 4) + c").symbols == {"b", "c"}


@given(b=st.integers(1, 30), c=st.integers(1, 30))
def test_sizes_are_those_of_jax(b: int, c: int) -> None:
    symbols = export.symbolic_shape("b, c")
    x, y = symbols
    for expression, size in (
        (x * x * y - 2 * y + 3, b * b * c - 2 * c + 3),
        ((x + y) // 3 + (x - y) % 5, (b + c) // 3 + (b - c) % 5),
    ):
        assert SymbolicDim("x.shape[0]", str(expression)).size({"b": b, "c": c}) == size


@pytest.mark.parametrize("text", ["b +", "__import__('os')", "b.c", "b if c else 1", "2.5"])
def test_what_is_no_expression_of_jax_is_refused(text: str) -> None:
    dim = SymbolicDim("x.shape[0]", text)
    with pytest.raises(
        ValueError, match=r"x\.shape\[0\] has the size '.*', which cannot be computed"
    ):
        dim.size({"b": 6, "c": 2})
