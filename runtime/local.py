"""The local executor: runs a plan in one process, each mesh on a subset of its devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import NamedSharding

from alpa.dialects import ir
from alpa.passes.plan.data import Program, ProgramArgument
from alpa.passes.plan.instructions import write_script
from alpa.runtime.argument_checks import ArgumentChecks, Placed
from alpa.runtime.buffers import Kind, apart, kind_of
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.cut_array import CutArray
from alpa.runtime.executable import CLOSED, Executable
from alpa.runtime.host_calls import refuse_host_calls
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.pjrt import ARRAY, Compiled, weakly_typed
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
        self._is_closed = False
        self._given = [
            (
                argument.number,
                None if argument.attributes.slice else self._interpreter.key(argument),
                placement.shardings[argument.value],
                is_donated(argument),
                argument,
            )
            for argument in placement.program.arguments
        ]
        """of each argument its number in the original program, where it is stored if it lies in
        place, where that is, and whether it is donated"""
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

    @property
    def is_stopped(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def place(self, number: int, array: Any) -> _Placed:
        self._check_open()
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
        self._check_open()
        arguments = apart(arguments, self._checks.donated, self._copies.kinds)
        store: Store = {}
        donated: list[jax.Array] = []
        recorder = None if self._trace is None else Recorder(self._script, settle=True)
        with jax.enable_x64(True):  # 64-bit values of the program keep their width
            for number, key, sharding, is_donated, argument in self._given:
                given = arguments[number]
                if key is not None and type(given) is ARRAY:
                    there = given.sharding
                    if there is sharding or there == sharding:
                        store[key] = given
                        if is_donated:
                            donated.append(given)
                        continue
                if isinstance(given, _Placed):
                    self._interpreter.take(store, argument, given.stores[argument.value])
                    continue
                array = self._part(argument, given, sharding)
                copy = self._copies.find(array, sharding)
                if is_donated and getattr(copy, "sharding", None) == sharding:
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
        self._check_open()
        arrays: dict[int, jax.Array] = {}
        for positions in self._signature.wanted(numbers).values():
            values = [self.program.arguments[position].value for position in positions]
            shardings = [self._placement.shardings[value] for value in values]
            parts = partial(self._signature.parts, numbers, function, positions)
            lowered = jax.jit(parts, out_shardings=shardings).lower()
            refuse_host_calls(cast(ir.Module, lowered.compiler_ir("stablehlo")))
            made = cast(list[jax.Array], lowered.compile()())
            for position, array in zip(positions, made, strict=True):
                arrays[position] = self._typed(self.program.arguments[position], array)
        return [*map(self._joined, self._signature.created(numbers, arrays, self._first))]

    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        self._check_open()
        by_number = dict(zip(numbers, stored, strict=True))
        arrays: dict[int, jax.Array] = {}
        for positions in self._signature.wanted(numbers).values():
            for position in positions:
                argument = self.program.arguments[position]
                sharding = self._placement.shardings[argument.value]
                array = by_number[argument.number]
                made = array.read(sharding, argument.attributes.slice)
                arrays[position] = self._typed(argument, made)
        return [*map(self._joined, self._signature.created(numbers, arrays, self._first))]

    def _typed(self, argument: ProgramArgument, array: jax.Array) -> jax.Array:
        """A new array for an argument, with the type that it has in JAX."""
        return weakly_typed(array) if argument.number in self.weak_arguments else array

    def _part(
        self, argument: ProgramArgument, given: Any, sharding: NamedSharding | None = None
    ) -> Any:
        """Returns an argument of the planned @main; arrays on workers are fetched once."""
        array = self._signature.part(argument, given, sharding)
        return array.fetch() if isinstance(array, MeshArray) else array

    def _collect(self, store: Store) -> tuple[jax.Array | CutArray, ...]:
        """One array for each result of the original program; remembers further copies."""
        found = self._interpreter.results(store)
        results = [found[position] for position in range(len(found))]
        if self.weak_results:
            for position, result in enumerate(self.program.results):
                if result.number in self.weak_results:
                    results[position] = weakly_typed(results[position])
        if self._is_plain:
            self._copies.remember_all(results)
            return tuple(results)
        copies = self._signature.copies(results)
        joined = self._signature.join({it: self._first(them) for it, them in copies.items()})
        return tuple(map(self._joined, joined))

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


def _delete_donated(donated: Iterable[jax.Array], left: Store) -> None:
    """Deletes donated arrays as JAX does, even if no fragment overwrote them.

    An array that remains after the step is returned unchanged, as its own new value.
    """
    alive = [array for array in donated if not array.is_deleted()]
    kept = {id(array) for array in left.values()} if alive else ()
    for array in alive:
        if id(array) not in kept:
            array.delete()


class _Placed(Placed):
    """An argument's micro-batches on their meshes, by the values of the planned arguments."""

    def __init__(self, owner: ArgumentChecks, number: int, stores: Mapping[int, Store]) -> None:
        super().__init__(owner, number)
        self.stores = stores


_Known = tuple[weakref.ref[jax.Array], list[jax.Array], Kind]
"""An array, its copies on other meshes, and its kind."""


class _Copies:
    """The returned arrays and their copies on other meshes, for the next step.

    Copies live as long as the array that the caller holds.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Known] = {}
        self._kinds: list[Kind] = []
        """of the results of a step"""
        self._limit = 0

    def remember(self, array: jax.Array, others: list[jax.Array]) -> None:
        key = id(array)
        # The copies are freed with the array. A reference without others waits for `_forget`.
        freed = (lambda _: self._of.pop(key, None)) if others else None
        self._of[key] = (weakref.ref(array, freed), others, kind_of(array))
        self._forget()

    def remember_all(self, results: Sequence[jax.Array]) -> None:
        """Remembers the results of a step, which have no copies and are of the same kinds in each
        step."""
        if not self._kinds:
            self._kinds = [kind_of(array) for array in results]
        none: list[jax.Array] = []
        self._of.update(
            (id(array), (weakref.ref(array), none, kind))
            for array, kind in zip(results, self._kinds, strict=True)
        )
        self._forget()

    def _forget(self) -> None:
        """Forgets the arrays that the caller has freed, each time that there are twice as many."""
        if len(self._of) > self._limit:
            self._of = {key: known for key, known in self._of.items() if known[0]() is not None}
            self._limit = 2 * len(self._of)

    def _known(self, array: Any) -> _Known | None:
        known = self._of.get(id(array))
        return known if known is not None and known[0]() is array else None

    def has(self, array: jax.Array) -> bool:
        """Whether other meshes have copies of the array."""
        known = self._known(array)
        return known is not None and bool(known[1])

    def kinds(self, arrays: Sequence[Any]) -> list[Kind | None]:
        """The kinds of arrays that were returned, which share their buffers with no other array;
        None for others."""
        known_of = self._of.get
        return [
            known[2] if (known := known_of(id(array))) and known[0]() is array else None
            for array in arrays
        ]

    def find(self, array: Any, sharding: NamedSharding) -> Any:
        """The copy in this sharding, or the array itself."""
        known = self._known(array)
        if known is None or array.sharding == sharding:
            return array
        live = (it for it in known[1] if it.sharding == sharding and not it.is_deleted())
        return next(live, array)
