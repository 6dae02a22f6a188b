"""The local executor: a plan in one process, each mesh a subset of its devices."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa.dialects.attributes import Plan, Slice
from alpa.passes.analysis.planned import Program, ProgramArgument
from alpa.runtime.cut_array import CutArray, part_of
from alpa.runtime.instructions import Instruction, Key, Move, Output, Run, write_script
from alpa.runtime.pjrt import Compiled
from alpa.runtime.placement import Placement, move, numpy_dtype
from alpa.runtime.tiles import Tiles


class Executable:
    """A planned program that can be called with the arguments of the original `@main`.

    Where the plan has B > 1 micro-batches, batch arguments are whole batches. Results are on the
    meshes, as the plan says, and can be fed back in as they are. An argument that the original
    program donates is donated here too: its array cannot be used again.
    """

    def __init__(self, placement: Placement, stages: Mapping[str, Compiled]) -> None:
        self._placement = placement
        self._script = write_script(placement.program)
        self._stages = dict(stages)
        self._tiles = Tiles(placement)
        self._copies = _Copies()
        # Without this, CPU devices run the collectives of several programs at once, and the
        # threads that they share can all end up waiting.
        self._blocks = placement.devices[0].platform == "cpu"
        program = placement.program
        # How many rows there are in all of what arguments take slices of, by their numbers.
        self._rows: dict[int, int] = {}
        for argument in program.arguments:
            if (part := argument.attributes.slice) is not None:
                rows = self._rows.get(argument.number, 0)
                self._rows[argument.number] = max(rows, part.stop)
        self._donated = frozenset(f.inputs[i] for f in program.fragments for i in f.donated)

    @property
    def program(self) -> Program:
        """The planned program as plain data."""
        return self._placement.program

    @property
    def plan(self) -> Plan:
        """The plan's attributes: micro-batches, schedule, predictions."""
        return self.program.plan

    @property
    def stages(self) -> Mapping[str, Compiled]:
        """The compiled fragments by the names of their modules."""
        return self._stages

    def __call__(self, *arguments: Any) -> tuple[jax.Array | CutArray, ...]:
        """Runs one step. What the plan cuts between meshes comes back as a `CutArray`.

        Raises:
            TypeError, ValueError: number, shape or dtype of the arguments are not the program's.
        """
        count = 1 + max((a.number for a in self.program.arguments), default=-1)
        if len(arguments) != count:
            raise TypeError(f"the program takes {count} arguments, {len(arguments)} were given")
        store: dict[Key, jax.Array] = {}
        with jax.enable_x64(True):  # 64-bit values of the program keep their width
            for argument in self.program.arguments:
                self._feed(store, argument, arguments[argument.number])
            for instruction in self._script.instructions:
                self._execute(store, instruction)
                for key in instruction.free:
                    store.pop(key, None)
            return self._collect(store)

    def _feed(self, store: dict[Key, jax.Array], argument: ProgramArgument, given: Any) -> None:
        """Puts an argument, or its micro-batches, on its mesh."""
        program, value = self.program, self.program.values[argument.value]
        batches, shape = program.num_micro_batches, list(value.shape)
        part = argument.attributes.slice
        if part is not None:
            shape[part.dim] = self._rows[argument.number]
        dim = argument.attributes.batch_dim if argument.attributes.role == "batch" else None
        if dim is not None:
            shape[dim] *= batches
        dtype = numpy_dtype(value.dtype)
        array = given if hasattr(given, "dtype") else np.asarray(given, dtype)
        if tuple(array.shape) != tuple(shape) or array.dtype != dtype:
            whole = (
                f", the whole batch: {batches} micro-batches of {value.shape[dim]} in dimension "
                f"{dim}"
                if dim is not None and batches > 1
                else ""
            )
            raise ValueError(
                f"argument {argument.number} is {array.dtype}{list(array.shape)}; "
                f"expected {dtype}{shape}{whole}"
            )
        if part is not None:
            array = part_of(array, part)
        sharding = self._placement.shardings[argument.value]
        marked = argument.attributes.donor or argument.attributes.aliasing_output is not None
        # numpy arrays may change under our hands, and only the caller may give an array away
        protect = not isinstance(array, jax.Array) or (
            argument.value in self._donated and not marked
        )
        if argument.value not in program.varying:
            if (argument.value, None) in self._script.given:
                array = self._copies.find(array, sharding)
                store[argument.value, None] = move(array, sharding, copy=protect)
        elif dim is None:  # a state that the forward part carries on
            array = self._copies.find(array, sharding)
            store[argument.value, 0] = move(array, sharding, copy=protect)
        else:
            for m in range(batches):
                if (argument.value, m) in self._script.given:
                    batch = array if batches == 1 else _slice(array, dim, m, value.shape[dim])
                    store[argument.value, m] = move(batch, sharding, copy=protect)

    def _execute(self, store: dict[Key, jax.Array], instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            fragment = instruction.fragment
            inputs = [store[key] for key in instruction.inputs]
            inputs += [
                store[key] if key in store else self._zeros(key[0])
                for key in instruction.accumulators
            ]
            outputs = self._stages[fragment.module or fragment.name](inputs)
            if self._blocks:
                jax.block_until_ready(outputs)
            store.update(zip(instruction.outputs, outputs, strict=True))
        elif isinstance(instruction, Move):
            source, target = instruction.source[0], instruction.target[0]
            if (transfer := self._tiles.planned.get(target)) is not None:
                store[instruction.target] = self._tiles.carry(store[instruction.source], transfer)
                return
            values = self.program.values
            store[instruction.target] = move(
                store[instruction.source],
                self._placement.shardings[target],
                copy=values[source].mesh == values[target].mesh,
            )
        else:
            store[instruction.total] = _add(store.get(instruction.total), store[instruction.source])

    def _zeros(self, number: int) -> jax.Array:
        value = self.program.values[number]
        sharding = self._placement.shardings[number]
        return jnp.zeros(value.shape, numpy_dtype(value.dtype), device=sharding)

    def _collect(self, store: Mapping[Key, jax.Array]) -> tuple[jax.Array | CutArray, ...]:
        """One array for each result of the original program; further copies are remembered."""
        copies: dict[tuple[int, Slice | None], list[jax.Array]] = {}
        taken: set[int] = set()
        for result, output in zip(self.program.results, self._script.outputs, strict=True):
            array = self._output(output, [store[key] for key in output.keys])
            if id(array) in taken:  # two results, which the caller may donate one by one
                array = move(array, self._placement.shardings[output.keys[0][0]], copy=True)
            taken.add(id(array))
            copies.setdefault((result.number, result.attributes.slice), []).append(array)
        for first, *others in copies.values():
            if others:
                self._copies.remember(first, others)
        results: dict[int, jax.Array | CutArray] = {}
        parts: dict[int, dict[Slice, jax.Array]] = {}
        for (number, part), (array, *_) in copies.items():
            if part is None:
                results[number] = array
            else:
                parts.setdefault(number, {})[part] = array
        results |= {number: CutArray(cut) for number, cut in parts.items()}
        return tuple(results[number] for number in sorted(results))

    def _output(self, output: Output, arrays: Sequence[jax.Array]) -> jax.Array:
        number = output.keys[0][0]
        sharding = self._placement.shardings[number]
        dtype = numpy_dtype(self.program.values[number].dtype)
        if output.concat is not None:
            return move(jnp.concatenate(arrays, axis=output.concat), sharding)
        array = arrays[0]
        if output.divisor > 1:
            array = array / output.divisor
        return array if array.dtype == dtype else move(array.astype(dtype), sharding)


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


def _slice(array: Any, dim: int, m: int, size: int) -> Any:
    return array[(*[slice(None)] * dim, slice(m * size, (m + 1) * size))]


def _add(total: jax.Array | None, array: jax.Array) -> jax.Array:
    """The next partial sum; 16-bit floats are added up in 32 bits."""
    if array.dtype in (jnp.bfloat16, jnp.float16):
        array = array.astype(jnp.float32)
    return array if total is None else total + array
