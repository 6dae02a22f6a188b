"""The local executor: runs a plan in one process, each mesh on a subset of its devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import NamedSharding

from alpa.dialects import ir
from alpa.passes.plan.data import Program, ProgramArgument
from alpa.passes.plan.instructions import Key, write_script
from alpa.runtime.argument_checks import ArgumentChecks, Placed
from alpa.runtime.buffers import apart
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.cut_array import CutArray
from alpa.runtime.executable import Executable
from alpa.runtime.host_calls import refuse_host_calls
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.pjrt import Compiled
from alpa.runtime.placement import Placement
from alpa.runtime.signature import Signature, is_donated
from alpa.runtime.tiles import Tiles
from alpa.runtime.trace import Recorder


class LocalExecutable(Executable):
    """Runs the instructions of all meshes in turn. Results are JAX arrays."""

    def __init__(self, placement: Placement, stages: Mapping[str, Compiled]) -> None:
        self._placement = placement
        self._script = write_script(placement.program)
        self._stages = dict(stages)
        self._signature = Signature(placement.program)
        self._interpreter = Interpreter(placement, self._script, self._stages, Tiles(placement))
        self._copies = _Copies()
        self._given = [
            _Given(
                argument=argument,
                sharding=placement.shardings[argument.value],
                is_donated=is_donated(argument),
                key=None if argument.attributes.slice else self._interpreter.key(argument),
            )
            for argument in placement.program.arguments
        ]
        parts = [(it.number, it.attributes.slice) for it in placement.program.results]
        self._is_plain = parts == [(number, None) for number in range(len(parts))]

    @property
    def program(self) -> Program:
        return self._placement.program

    @property
    def stages(self) -> Mapping[str, Compiled]:
        return self._stages

    @property
    def _checks(self) -> ArgumentChecks:
        return self._signature.checks

    def close(self) -> None:
        """There is nothing to end."""

    def place(self, number: int, array: Any) -> _Placed:
        stores: dict[int, Store] = {}
        positions = self._signature.positions(number)
        array = self._checks.check_one(number, array)
        with jax.enable_x64(True):
            for position in positions:
                argument = self.program.arguments[position]
                store = stores[argument.value] = {}
                self._interpreter.feed(store, argument, self._part(argument, array))
        return _Placed(self._checks, number, stores)

    def run(self, arguments: Sequence[Any]) -> tuple[jax.Array | CutArray, ...]:
        arguments = apart(arguments, self._checks.donated, self._copies.knows)
        store: Store = {}
        donated: list[jax.Array] = []
        recorder = None if self._trace is None else Recorder(self._script, settle=True)
        with jax.enable_x64(True):  # 64-bit values of the program keep their width
            for each in self._given:
                argument, sharding = each.argument, each.sharding
                given = arguments[argument.number]
                if each.key is not None and _is_in(given, sharding):
                    store[each.key] = given
                    if each.is_donated:
                        donated.append(given)
                    continue
                if isinstance(given, _Placed):
                    self._interpreter.take(store, argument, given.stores[argument.value])
                    continue
                array = self._part(argument, given, sharding)
                copy = self._copies.find(array, sharding)
                if each.is_donated and getattr(copy, "sharding", None) == sharding:
                    donated += {id(it): it for it in (array, copy)}.values()
                self._interpreter.feed(store, argument, copy)
            if recorder is None:
                self._interpreter.run(store, self._script.instructions)
            else:
                recorder.start()
                self._interpreter.run(store, self._script.instructions, after=recorder)
            results = self._collect(store)
        _delete_donated(donated, store)
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
            lowered = jax.jit(parts, out_shardings=shardings).lower()
            refuse_host_calls(cast(ir.Module, lowered.compiler_ir("stablehlo")))
            made = cast(list[jax.Array], lowered.compile()())
            arrays.update(zip(positions, made, strict=True))
        return [*map(self._joined, self._signature.created(numbers, arrays, self._first))]

    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        by_number = dict(zip(numbers, stored, strict=True))
        arrays: dict[int, jax.Array] = {}
        for positions in self._signature.wanted(numbers).values():
            for position in positions:
                argument = self.program.arguments[position]
                sharding = self._placement.shardings[argument.value]
                array = by_number[argument.number]
                arrays[position] = array.read(sharding, argument.attributes.slice)
        return [*map(self._joined, self._signature.created(numbers, arrays, self._first))]

    def _part(
        self, argument: ProgramArgument, given: Any, sharding: NamedSharding | None = None
    ) -> Any:
        """Returns an argument of the planned @main; arrays on workers are fetched once."""
        array = self._signature.part(argument, given, sharding)
        return array.fetch() if isinstance(array, MeshArray) else array

    def _collect(self, store: Store) -> tuple[jax.Array | CutArray, ...]:
        """One array for each result of the original program; remembers further copies."""
        results = self._interpreter.results(store)
        self._copies.forget()
        if self._is_plain:
            arrays = tuple(results[i] for i in range(len(results)))
            for array in arrays:
                self._copies.remember(array, [])
            return arrays
        copies = self._signature.copies([results[i] for i in range(len(results))])
        results = self._signature.join({it: self._first(them) for it, them in copies.items()})
        return tuple(map(self._joined, results))

    def _joined(self, array: Any) -> Any:
        """Joins a state that is split between meshes into one array, if that takes no copy.

        If other meshes have copies of its parts, it stays split: the copies are found by the parts.
        """
        if not isinstance(array, CutArray) or any(map(self._copies.has, array.parts.values())):
            return array
        shared = array.shared()
        return array if shared is None else shared

    def _first(self, copies: list[jax.Array]) -> jax.Array:
        """The array that represents several copies on different meshes."""
        first, *others = copies
        self._copies.remember(first, others)
        return first


@dataclass(frozen=True, kw_only=True)
class _Given:
    """How an argument is given to each step. `key` is where an array that lies in place goes."""

    argument: ProgramArgument
    sharding: NamedSharding
    is_donated: bool
    key: Key | None


def _is_in(array: Any, sharding: NamedSharding) -> bool:
    """Whether it is an array of this process in a sharding."""
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, MeshArray)
        and array.sharding == sharding
    )


def _delete_donated(donated: Iterable[jax.Array], left: Store) -> None:
    """Deletes donated arrays as JAX does, even if no fragment overwrote them.

    An array that remains after the step is returned unchanged, as its own new value.
    """
    kept = {id(array) for array in left.values()}
    for array in donated:
        if id(array) not in kept and not array.is_deleted():
            array.delete()


class _Placed(Placed):
    """An argument's micro-batches on their meshes, by the values of the planned arguments."""

    def __init__(self, owner: ArgumentChecks, number: int, stores: Mapping[int, Store]) -> None:
        super().__init__(owner, number)
        self.stores = stores


class _Copies:
    """The returned arrays and their copies on other meshes, for the next step.

    Copies live as long as the array that the caller holds.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[jax.Array], list[jax.Array]]] = {}

    def remember(self, array: jax.Array, others: list[jax.Array]) -> None:
        key = id(array)
        # The copies are freed with the array. A reference without others waits for `forget`.
        freed = (lambda _: self._of.pop(key, None)) if others else None
        self._of[key] = (weakref.ref(array, freed), others)

    def forget(self) -> None:
        """Forgets the arrays that the caller has freed."""
        self._of = {key: known for key, known in self._of.items() if known[0]() is not None}

    def has(self, array: jax.Array) -> bool:
        """Whether other meshes have copies of the array."""
        reference, others = self._of.get(id(array), (None, []))
        return bool(others) and reference is not None and reference() is array

    def knows(self, array: Any) -> bool:
        """Whether an array was returned, so that no other array shares its buffers."""
        reference, _ = self._of.get(id(array), (None, []))
        return reference is not None and reference() is array

    def find(self, array: Any, sharding: NamedSharding) -> Any:
        """The copy in this sharding, or the array itself."""
        reference, others = self._of.get(id(array), (None, []))
        if reference is None or reference() is not array or array.sharding == sharding:
            return array
        live = (other for other in others if other.sharding == sharding and not other.is_deleted())
        return next(live, array)
