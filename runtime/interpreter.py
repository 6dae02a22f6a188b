"""Runs instructions on arrays: one step of a program, or of one mesh of it.

Both executors share this. The local executor holds all meshes and runs the common list; a worker
holds one mesh and runs its own list. They differ in where tiles go (`tiles.Links`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from alpa.passes.plan.data import Program, ProgramArgument
from alpa.passes.plan.instructions import Add, Instruction, Move, Output, Run, Script
from alpa.passes.plan.versions import Key
from alpa.runtime.dtypes import numpy_dtype
from alpa.runtime.exported import module_name
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.pjrt import Compiled
from alpa.runtime.placement import Placement, move, rows
from alpa.runtime.signature import batch_dim, is_donated
from alpa.runtime.tiles import Tiles

Store = dict[Key, jax.Array]
Arrays = TypeVar("Arrays", jax.Array, list[jax.Array])


class Interpreter:
    """Runs a script's instructions on the meshes of a placement.

    A store holds the arrays of one step by their keys, without those of other meshes.
    """

    def __init__(
        self,
        placement: Placement,
        script: Script,
        stages: Mapping[str, Compiled],
        tiles: Tiles,
    ) -> None:
        self._placement, self._script = placement, script
        self._stages, self._tiles = stages, tiles
        # Otherwise CPU devices run the collectives of several programs at once, and all threads of
        # their common pool can end up waiting.
        several = any(len(mesh.devices) > 1 for mesh in script.program.meshes)
        self._blocks = placement.platform == "cpu" and several
        fragments = script.program.fragments
        self._donated = frozenset(f.inputs[i] for f in fragments for i in f.donated)
        self._overwritten = _overwritten(script)
        self._zeros: dict[tuple[int, ...], Callable[[], list[jax.Array]]] = {}
        """what makes the sums of these values, before their first micro-batch"""
        callers = frozenset(a.value for a in script.program.arguments if not is_donated(a))
        self._outputs = [
            (
                position,
                output,
                _is_stored(output, script.program),
                output.keys[-1] in script.given and output.value in callers,
            )
            for position, output in enumerate(script.outputs)
            if placement.has(output.value)
        ]
        """the results on these meshes by position, whether they are stored as they are, and whether
        the caller holds the array"""
        values = {output.value for _, output, *_ in self._outputs}
        self._dtypes = {it: numpy_dtype(script.program.values[it].dtype) for it in values}

    def key(self, argument: ProgramArgument) -> Key | None:
        """The key under which an array of the caller is stored as it is if it lies in place.

        None if there are several, or none, or if the program overwrites what the caller keeps.
        """
        program, number = self._script.program, argument.value
        if number in self._donated and not is_donated(argument):
            return None
        varies = number in program.varying
        if varies and batch_dim(argument) is not None and program.num_micro_batches > 1:
            return None
        key = (number, 0 if varies else None)
        return key if key in self._script.given else None

    def feed(self, store: Store, argument: ProgramArgument, array: Any) -> None:
        """Puts an argument, or its micro-batches, on its mesh.

        Makes new buffers if the program overwrites the argument and the caller keeps it, and for
        numpy arrays, which the caller may change later.
        """
        if isinstance(array, MeshArray):
            array = array.fetch()
        program, number = self._script.program, argument.value
        sharding, dim = self._placement.shardings[number], batch_dim(argument)
        protect = not isinstance(array, jax.Array) or (
            number in self._donated and not is_donated(argument)
        )
        if number not in program.varying:
            if (number, None) in self._script.given:
                store[number, None] = move(array, sharding, copy=protect)
        elif dim is None:  # a state that the forward part carries
            store[number, 0] = move(array, sharding, copy=protect)
        else:
            batches, size = program.num_micro_batches, program.values[number].shape[dim]
            for m in range(batches):
                if (number, m) in self._script.given:
                    batch = array if batches == 1 else rows(array, dim, m * size, (m + 1) * size)
                    store[number, m] = move(batch, sharding, copy=protect)

    def take(self, store: Store, argument: ProgramArgument, placed: Store) -> None:
        """Takes an argument that was fed to another store, and leaves that store unchanged."""
        for key, array in placed.items():
            copy = argument.value in self._donated
            store[key] = move(array, self._placement.shardings[argument.value], copy=copy)

    def run(
        self,
        store: Store,
        instructions: Iterable[Instruction],
        after: Callable[[Instruction, Store], None] = lambda *_: None,
    ) -> None:
        """Runs instructions one by one; calls `after` with each one and the store."""
        for instruction in instructions:
            self._execute(store, instruction)
            for key in instruction.free:
                store.pop(key, None)
            after(instruction, store)

    def results(self, store: Store) -> dict[int, jax.Array]:
        """The results of the planned @main on these meshes, by position."""
        results: dict[int, jax.Array] = {}
        taken: set[int] = set()
        for position, output, is_stored, is_callers in self._outputs:
            array = stored = store[output.keys[0]]
            if not is_stored:
                array = self._output(output, [store[key] for key in output.keys])
            if is_callers or id(array) in taken:  # the caller gets two arrays, and may donate one
                array = move(array, self._placement.shardings[output.value], copy=True)
            taken.add(id(array))
            # Settling hundreds of arrays one by one takes milliseconds; stored ones need it not.
            results[position] = array if array is stored else self._settled(array)
        return results

    def _execute(self, store: Store, instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            self._run(store, instruction)
        elif isinstance(instruction, Move):
            self._move(store, instruction)
        else:
            self._add(store, instruction)

    def _run(self, store: Store, instruction: Run) -> None:
        fragment = instruction.fragment
        self._start_sums(store, instruction.accumulators)
        inputs = [store[key] for key in (*instruction.inputs, *instruction.accumulators)]
        outputs = self._stages[module_name(fragment)](inputs)
        store.update(zip(instruction.outputs, self._settled(outputs), strict=True))

    def _move(self, store: Store, instruction: Move) -> None:
        source, target = instruction.source[0], instruction.target[0]
        values = self._script.program.values
        if values[source].mesh == values[target].mesh:
            sharding = self._placement.shardings[target]
            array = move(store[instruction.source], sharding, copy=True)
            store[instruction.target] = self._settled(array)
            return
        array = self._tiles.carry(
            store.get(instruction.source),
            self._tiles.transfer(source, target),
            copy=instruction.source in self._overwritten,
        )
        if array is not None:
            store[instruction.target] = array

    def _add(self, store: Store, instruction: Add) -> None:
        """The next partial total, in the type of the plan's accumulators."""
        program, number = self._script.program, instruction.source[0]
        dtype = numpy_dtype(program.plan.accumulator(program.values[number].dtype))
        array = store[instruction.source]
        if array.dtype != dtype:
            array = array.astype(dtype)
        total = store.get(instruction.total)
        store[instruction.total] = array if total is None else total + array

    def _settled(self, arrays: Arrays) -> Arrays:
        return jax.block_until_ready(arrays) if self._blocks else arrays

    def _start_sums(self, store: Store, keys: Iterable[Key]) -> None:
        """Makes the sums that no micro-batch has begun, all by one call."""
        new = tuple(key[0] for key in keys if key not in store)
        if not new:
            return
        if new not in self._zeros:
            values = [self._script.program.values[number] for number in new]
            types = [(value.shape, numpy_dtype(value.dtype)) for value in values]
            self._zeros[new] = jax.jit(
                lambda: [jnp.zeros(shape, dtype) for shape, dtype in types],
                out_shardings=[self._placement.shardings[number] for number in new],
            )
        store.update(
            zip((key for key in keys if key not in store), self._zeros[new](), strict=True)
        )

    def _output(self, output: Output, arrays: list[jax.Array]) -> jax.Array:
        array, dtype = arrays[0], self._dtypes[output.value]
        if output.concat is None and output.divisor == 1 and array.dtype == dtype:
            return array
        sharding = self._placement.shardings[output.value]
        if output.concat is not None:
            return move(jnp.concatenate(arrays, axis=output.concat), sharding)
        if output.divisor > 1:
            array = array / output.divisor
        return array if array.dtype == dtype else move(array.astype(dtype), sharding)


def _is_stored(output: Output, program: Program) -> bool:
    """Whether a result is the array that is stored, and no sum, which may have another type."""
    one = program.num_micro_batches == 1 or program.parts[output.keys[0][0]] == "update"
    return one and output.concat is None and output.divisor == 1


def _overwritten(script: Script) -> frozenset[Key]:
    """The keys whose buffers fragments overwrite, in this step or the next.

    The next step may overwrite an array that the caller holds, and a mesh may be one step ahead of
    the meshes that it sends to.
    """
    runs = [i for i in script.instructions if isinstance(i, Run)]
    donated = {run.inputs[number] for run in runs for number in run.fragment.donated}
    totals = {key for run in runs for key in run.accumulators}
    returned = {key for output in script.outputs for key in output.keys}
    return frozenset(donated | totals | returned | script.given)
