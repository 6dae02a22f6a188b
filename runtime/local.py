"""The local executor: a plan in one process, each mesh a subset of its devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa.passes.analysis.planned import Program, ProgramArgument
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.cut_array import CutArray
from alpa.runtime.executable import Executable
from alpa.runtime.instructions import write_script
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.pjrt import Compiled
from alpa.runtime.placement import Placement
from alpa.runtime.signature import Signature
from alpa.runtime.tiles import Tiles
from alpa.runtime.trace import Recorder


class LocalExecutable(Executable):
    """Runs the instructions of all meshes in turn. Results are jax arrays."""

    def __init__(self, placement: Placement, stages: Mapping[str, Compiled]) -> None:
        self._placement = placement
        self._script = write_script(placement.program)
        self._stages = dict(stages)
        self._signature = Signature(placement.program)
        self._interpreter = Interpreter(placement, self._script, self._stages, Tiles(placement))
        self._copies = _Copies()

    @property
    def program(self) -> Program:
        return self._placement.program

    @property
    def stages(self) -> Mapping[str, Compiled]:
        return self._stages

    def place(self, number: int, array: Any) -> _Placed:
        stores: dict[int, Store] = {}
        with jax.enable_x64(True):
            for position in self._signature.positions(number):
                argument = self.program.arguments[position]
                store = stores[argument.value] = {}
                self._interpreter.feed(store, argument, self._signature.part(argument, array))
        return _Placed(number, array, stores)

    def __call__(self, *arguments: Any) -> tuple[jax.Array | CutArray, ...]:
        self._signature.check_number(arguments)
        store: Store = {}
        recorder = None if self._trace is None else Recorder(self._script, settle=True)
        with jax.enable_x64(True):  # 64-bit values of the program keep their width
            for argument in self.program.arguments:
                given = arguments[argument.number]
                if isinstance(given, _Placed):
                    self._interpreter.take(store, argument, given.store_for(argument))
                    continue
                array = self._signature.part(argument, given)
                array = self._copies.find(array, self._placement.shardings[argument.value])
                self._interpreter.feed(store, argument, array)
            if recorder is None:
                self._interpreter.run(store, self._script.instructions)
            else:
                recorder.start()
                self._interpreter.run(store, self._script.instructions, after=recorder)
            results = self._collect(store)
        if recorder is not None and self._trace is not None:
            jax.block_until_ready(results)
            names = [mesh.name for mesh in self.program.meshes]
            self._trace.add([recorder.of(name, name) for name in names])
        return results

    def create(
        self, numbers: Sequence[int], function: Callable[[], Sequence[jax.Array]]
    ) -> list[jax.Array | CutArray]:
        arrays: dict[int, jax.Array] = {}
        for positions in self._signature.wanted(numbers).values():
            values = [self.program.arguments[position].value for position in positions]
            shardings = [self._placement.shardings[value] for value in values]
            parts = partial(self._signature.parts, numbers, function, positions)
            made = jax.jit(parts, out_shardings=shardings)()
            arrays.update(zip(positions, made, strict=True))
        return self._signature.created(numbers, arrays, self._first)

    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        by_number = dict(zip(numbers, stored, strict=True))
        arrays: dict[int, jax.Array] = {}
        for positions in self._signature.wanted(numbers).values():
            for position in positions:
                argument = self.program.arguments[position]
                sharding = self._placement.shardings[argument.value]
                array = by_number[argument.number]
                arrays[position] = array.read(sharding, argument.attributes.slice)
        return self._signature.created(numbers, arrays, self._first)

    def _collect(self, store: Store) -> tuple[jax.Array | CutArray, ...]:
        """One array for each result of the original program; further copies are remembered."""
        results = self._interpreter.results(store)
        copies = self._signature.copies([results[i] for i in range(len(results))])
        return self._signature.join({part: self._first(them) for part, them in copies.items()})

    def _first(self, copies: list[jax.Array]) -> jax.Array:
        """What stands for an array of which several meshes have a copy."""
        first, *others = copies
        if others:
            self._copies.remember(first, others)
        return first


class _Placed:
    """An argument's micro-batches on their meshes, by the values of the planned arguments."""

    def __init__(self, number: int, array: Any, stores: Mapping[int, Store]) -> None:
        self.shape: tuple[int, ...] = tuple(np.shape(array))
        self.dtype: np.dtype[Any] = np.asarray(array).dtype
        self._number, self._stores = number, stores

    def store_for(self, argument: ProgramArgument) -> Store:
        if argument.number != self._number:
            raise ValueError(
                f"argument {argument.number} is what was placed as argument {self._number}"
            )
        return self._stores[argument.value]


class _Copies:
    """Further copies, on other meshes, of an array that was returned: the next step may want them.

    They live as long as the array that the caller holds.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[jax.Array], list[jax.Array]]] = {}

    def remember(self, array: jax.Array, others: list[jax.Array]) -> None:
        key = id(array)
        self._of[key] = (weakref.ref(array, lambda _: self._of.pop(key, None)), others)

    def find(self, array: Any, sharding: NamedSharding) -> Any:
        """The copy in this sharding, or the array itself."""
        reference, others = self._of.get(id(array), (None, []))
        if reference is None or reference() is not array or array.sharding == sharding:
            return array
        live = (other for other in others if other.sharding == sharding and not other.is_deleted())
        return next(live, array)
