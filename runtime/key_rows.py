"""Arrays whose rows are written one by one with keys, such as `keys = keys.at[i].set(key)`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.extend.core import Literal as JaxprLiteral

from alpa.runtime.dtypes import is_integer


@dataclass(frozen=True)
class KeyRows:
    """The rows of the arrays of one jaxpr that hold keys of the micro-batch.

    Only rows that are written at places known when the function is traced count. A loop is another
    jaxpr.
    """

    places: dict[Any, int] = field(default_factory=dict[Any, int])
    """the number that a variable of one element holds, where it is known"""
    written: dict[Any, frozenset[int]] = field(default_factory=dict[Any, frozenset[int]])

    def are_all_written(self, eqn: JaxprEqn, *, by_key: bool) -> bool:
        """Whether an equation writes the last row of an array that held no key of the micro-batch.

        Args:
            eqn: the next equation of the jaxpr.
            by_key: whether all of its last operand comes from keys of the micro-batch.
        """
        if eqn.primitive.name == "broadcast_in_dim":
            (number, *_), (result,) = eqn.invars, eqn.outvars
            holds_integers = is_integer(cast(ShapedArray, result.aval).dtype)
            if isinstance(number, JaxprLiteral) and holds_integers and _shape(result) == (1,):
                self.places[result] = int(number.val)
        if not _writes_row(eqn):
            return False
        array, place, _ = eqn.invars
        (result,) = eqn.outvars
        size, row = _shape(result)[0], self.places.get(place)
        before = self.written.get(array, frozenset[int]())
        if row is None or not 0 <= row < size:
            before = frozenset()  # This may replace any row.
        elif by_key:
            before |= {row}
        else:
            before -= {row}
        self.written[result] = before
        return len(before) == size


def _writes_row(eqn: JaxprEqn) -> bool:
    """Whether an equation replaces one row of an array."""
    if eqn.primitive.name != "scatter":
        return False
    array, place, row = map(_shape, eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    return (
        place == (1,)
        and row == array[1:]
        and numbers.update_window_dims == tuple(range(len(row)))
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
    )


def _shape(atom: Any) -> tuple[int, ...]:
    return cast(ShapedArray, atom.aval).shape
