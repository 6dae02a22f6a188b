"""Checks the arguments of a call before anything runs, on all executors.

If JAX has an error for a mistake, the error here has the same class and text, and also names the
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from alpa.runtime.cut_array import CutArray
from alpa.runtime.interrupts import Lost
from alpa.runtime.mesh_array import LOST, MeshArray
from alpa.runtime.pjrt import ARRAY
from alpa.runtime.workers.errors import WorkerError

Label = Callable[[int], str]
"""The name of an argument by its number."""

_SHOWN = 5  # mismatches that an error lists

# The dtypes that represent a Python number exactly.
_TAKE: dict[type, tuple[Any, ...]] = {
    bool: (jnp.bool_,),
    int: (jnp.integer, jnp.inexact),
    float: (jnp.inexact,),
    complex: (jnp.complexfloating,),
}


class ArgumentTypeError(TypeError, ValueError):
    """The shape or dtype of an argument differs from what the program was compiled for.

    JAX's compiled functions raise a TypeError. This error is also a ValueError, so that one clause
    can catch all errors about argument values.
    """


class Placed:
    """An argument placed on the meshes of an executable before its step.

    `owner` is the `ArgumentChecks` of the executable.
    """

    def __init__(self, owner: ArgumentChecks, number: int) -> None:
        expected = owner.expected[number]
        self.owner, self.number = owner, number
        self.shape, self.dtype = expected.shape, expected.dtype


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The type of one argument; `batches` says how the shape is a whole batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    donated: bool
    batches: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{self.batches}"


class ArgumentChecks:
    """Checks the arguments of each call of one executable, by number."""

    def __init__(self, expected: Mapping[int, Expected]) -> None:
        self.expected = dict(expected)
        self.donated = frozenset(n for n, it in self.expected.items() if it.donated)
        self._count = 1 + max(self.expected, default=-1)
        self.lost = Lost()

    def check(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns the arguments of a call, with Python numbers converted to arrays.

        Raises:
            ArgumentTypeError: shapes or dtypes are not the program's.
            TypeError: the number of arguments is wrong, or one is not an array.
            ValueError: one was placed as another argument, or for another executable.
            RuntimeError: one was deleted or donated, a donated one is given twice, or the workers
                that held one are gone.
        """
        if len(arguments) != self._count:
            raise TypeError(
                f"the program takes {self._count} arguments, {len(arguments)} were given; pass "
                "those of its @main, each leaf of a tree separately (jax.tree.leaves)"
            )
        arrays = [self._array(number, given) for number, given in enumerate(arguments)]
        self._check_types(dict(enumerate(arrays)))
        check_usable(arrays, numbered, self.lost)
        check_donations(arrays, self.donated, numbered)
        return arrays

    def check_one(self, number: int, given: Any) -> Any:
        """Checks one argument, as `check` does. The elements of a traced array are not read."""
        if isinstance(given, Tracer):
            self._check_types({number: given})
            return given
        array = self._array(number, given)
        self._check_types({number: array})
        check_usable([array], lambda _: numbered(number), self.lost)
        return array

    def _array(self, number: int, given: Any) -> Any:
        if isinstance(given, Tracer):
            raise TypeError(
                f"{numbered(number)} is being traced: an executable runs on whole meshes and "
                "cannot be called inside jax.jit, grad or vmap; call it outside"
            )
        if isinstance(given, MeshArray):
            return given
        if hasattr(given, "__jax_array__"):
            return given.__jax_array__()
        if hasattr(given, "dtype"):
            return given
        expected = self.expected.get(number)
        wanted = "an array" if expected is None else str(expected)
        if not isinstance(given, bool | int | float | complex):
            raise TypeError(
                f"{numbered(number)} is a {type(given).__name__}, not an array; expected "
                f"{wanted}. Pass each leaf of a tree separately (jax.tree.leaves), and lists as "
                "arrays (numpy.asarray)"
            )
        dtype = np.result_type(given) if expected is None else expected.dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in _TAKE[type(given)]):
            raise ArgumentTypeError(
                f"{_TYPES_DIFFER}{numbered(number)} is {given!r}, a Python "
                f"{type(given).__name__}; expected {wanted}"
            )
        try:
            return np.asarray(given, dtype)
        except OverflowError as error:
            raise ArgumentTypeError(
                f"{_TYPES_DIFFER}{numbered(number)} is {given!r}, which {dtype} cannot hold; "
                f"expected {wanted}"
            ) from error

    def _check_types(self, arrays: Mapping[int, Any]) -> None:
        wrong: list[str] = []
        for number, array in arrays.items():
            expected = self.expected.get(number)
            if isinstance(array, Placed):
                self._check_placed(number, array)
            elif expected is not None and (
                array.shape != expected.shape or array.dtype != expected.dtype
            ):
                wrong.append(
                    f"{numbered(number)} is {array.dtype}{list(array.shape)}; expected {expected}"
                )
        if wrong:
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            advice = "Pass arrays of the expected types, or plan the program for these."
            raise ArgumentTypeError(_TYPES_DIFFER + "\n".join([*wrong[:_SHOWN], *more, advice]))

    def _check_placed(self, number: int, placed: Placed) -> None:
        if placed.owner is not self:
            raise ValueError(
                f"{numbered(number)} was placed as argument {placed.number} of another executable; "
                f"place it with this one: executable.place({number}, array)"
            )
        if placed.number != number:
            raise ValueError(
                f"{numbered(number)} was placed as argument {placed.number}; place it with "
                f"executable.place({number}, array)"
            )


_TYPES_DIFFER = (
    "Argument types differ from the types for which this computation was compiled. "
    "The mismatches are:\n"
)


def numbered(number: int) -> str:
    """The name of an argument that is known only by its number."""
    return f"argument {number}"


def check_usable(arrays: Sequence[Any], label: Label, lost: Lost) -> None:
    """Checks that arrays have data; `lost` knows those that went with an interrupted step.

    Raises:
        TypeError: one is only a shape.
        RuntimeError: one was deleted or donated; a WorkerError if its workers are gone.
    """
    for number, array in enumerate(arrays):
        if type(array) is ARRAY and not array.is_deleted():
            continue
        is_deleted = getattr(array, "is_deleted", None)
        if is_deleted is None:
            if isinstance(array, jax.ShapeDtypeStruct):
                name = label(number).removeprefix("argument ")
                raise TypeError(
                    f"Argument '{name}' of shape {array.dtype}{_text(array.shape)} of type "
                    f"{type(array)} is not a valid JAX type. Shapes can be planned for (plan, "
                    "lower, executable); pass an array to run"
                )
            continue
        if isinstance(array, MeshArray):
            try:
                array.check_workers()
            except WorkerError as error:
                raise WorkerError(f"{label(number)} is lost with its workers: {error}") from None
        if is_deleted():
            deleted = f"Array has been deleted with shape={array.dtype}{_text(array.shape)}"
            if lost.has(array):
                raise RuntimeError(f"{deleted}: {label(number)} {LOST}")
            raise RuntimeError(
                f"{deleted}: {label(number)} was donated to an earlier call, or deleted. Pass the "
                "array that this call returned in its place, or donate a copy (jax.numpy.copy); if "
                "the call was interrupted, restore the state from a checkpoint (alpa.resume)"
            )


def check_donations(arrays: Sequence[Any], donated: Collection[int], label: Label) -> None:
    """Checks that no donated array is given twice.

    NumPy arrays may be given twice: each argument gets its own buffers.

    Raises:
        jax.errors.JaxRuntimeError: a donated array is given twice.
    """
    if len({*map(id, arrays)}) == len(arrays) and not any(
        isinstance(array, CutArray) for array in arrays
    ):
        return
    first: dict[int, int] = {}
    for number in sorted(donated):
        for part in _parts(arrays[number]):
            other = first.setdefault(id(part), number)
            if other != number:
                raise jax.errors.JaxRuntimeError(
                    "INVALID_ARGUMENT: Attempt to donate the same buffer twice in Execute(): "
                    f"{label(other)} and {label(number)} are the same array, and both are donated. "
                    "Toy example for this bug: `f(donate(a), donate(a))`. Pass a copy as one of "
                    "them (jax.numpy.copy), or do not donate them"
                )
    if not first:
        return
    for number, array in enumerate(arrays):
        if number in donated:
            continue
        for part in _parts(array):
            if (other := first.get(id(part))) is not None:
                raise jax.errors.JaxRuntimeError(
                    "INVALID_ARGUMENT: Attempt to use a buffer that was previously donated in the "
                    f"same call to Execute(): {label(other)} and {label(number)} are the same "
                    f"array, and {label(other)} is donated. Toy example for this bug: "
                    "`f(donate(a), a)`. Pass a copy as one of them (jax.numpy.copy), or do not "
                    f"donate {label(other)}"
                )


def _parts(array: Any) -> tuple[Any, ...]:
    """The arrays that are deleted when this one is donated."""
    if isinstance(array, CutArray):
        return (array, *array.parts.values())
    return (array,) if hasattr(array, "is_deleted") else ()


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
