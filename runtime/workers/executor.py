"""The caller's side of a plan on Ray: one call per mesh and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np

from alpa.dialects import bytecode, ir
from alpa.dialects.attributes import Slice
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.instructions import write_script
from alpa.runtime.argument_checks import ArgumentChecks
from alpa.runtime.checkpoints.background import background
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.dtypes import numpy_dtype
from alpa.runtime.executable import CLOSED, Executable, Stage
from alpa.runtime.exported import module_name
from alpa.runtime.host_calls import refuse_host_calls
from alpa.runtime.interrupts import held_back
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.placement import abstract_mesh, sharding_of
from alpa.runtime.process_usage import ProcessUsage
from alpa.runtime.progress import Show, quiet
from alpa.runtime.signature import Signature, is_donated
from alpa.runtime.workers.cluster import posts_of
from alpa.runtime.workers.group import Call, WorkerGroup, wait_for
from alpa.runtime.workers.messages import ArrayId, StepCall, StepTimes
from alpa.runtime.workers.options import WorkerOptions
from alpa.runtime.workers.remote_array import Copy, PlacedArgument, RemoteArray


class RayExecutable(Executable):
    """Runs each mesh's own list in actors. Results are `RemoteArray`s.

    A call returns as soon as the workers have their orders. A failure is raised when its results
    are read, or by a later call. The workers live until `close`, or until nothing refers to the
    executable or an array of it. An executable made `beside` another one runs in its workers if
    both have the same meshes, and reads its arrays there.
    """

    def __init__(
        self,
        program: Program,
        modules: Mapping[str, bytes],
        options: WorkerOptions,
        compiler_options: CompilerOptions | None = None,
        beside: Iterable[Executable] = (),
        folders: tuple[Path, ...] = (),
        show: Show = quiet,
    ) -> None:
        self._program = program
        self._script = write_script(program)
        self._signature = Signature(program)
        posts = posts_of(program)
        groups = (other._group for other in beside if isinstance(other, RayExecutable))
        shared = next((group for group in groups if group.can_run(posts)), None)
        self._group = shared or WorkerGroup(posts, options, show)
        try:
            self._loaded = self._group.load(self._script, modules, compiler_options, folders, show)
        except KeyboardInterrupt:
            if shared is None:
                self._group.close("the workers were stopped while they compiled: interrupted")
            raise
        self._under_way: deque[_Step] = deque()
        self._placing: deque[Call] = deque()
        self._stages = {
            module_name(f): _Stage(self._group, self._loaded, f) for f in program.fragments
        }

    @property
    def program(self) -> Program:
        return self._program

    @property
    def stages(self) -> Mapping[str, Stage]:
        return self._stages

    @property
    def is_stopped(self) -> bool:
        return self._group.is_stopped

    @property
    def transport(self) -> str:
        """How tiles travel between the workers, and why, in words."""
        return self._group.transport

    @property
    def _checks(self) -> ArgumentChecks:
        return self._signature.checks

    def place(self, number: int, array: Any) -> PlacedArgument:
        """Places an argument, as for every executable, and returns at once.

        The workers put it on their devices while a step is running; the next steps wait for it.
        """
        positions = self._signature.positions(number)
        array = self._checks.check_one(number, array)
        call_number = self._group.next_number()
        copies: list[Copy] = []
        parts = [
            np.asarray(self._signature.part(self._program.arguments[position], array))
            for position in positions
        ]
        with held_back():
            for position, given in zip(positions, parts, strict=True):
                value = self._program.arguments[position].value
                mesh, key = self._program.values[value].mesh, (call_number, position)
                self._placing.append(self._group.call(mesh, "place", self._loaded, key, given))
                copies.append(Copy(mesh=mesh, value=value, key=key))
            return PlacedArgument(self._checks, number, self._group, copies)

    def create(
        self, numbers: Sequence[int], function: Callable[[], Sequence[jax.Array]]
    ) -> list[Any]:
        call_number = self._group.next_number()
        arrays: dict[int, Copy] = {}
        calls: dict[str, Call] = {}
        for mesh, positions in self._signature.wanted(numbers).items():
            parts = partial(self._signature.parts, numbers, function, positions)
            module = self._lowered(parts, mesh, positions)
            given = self._group.compile_creation(mesh, self._loaded, positions, module)
            calls[mesh] = self._group.call(
                mesh, "create", self._loaded, call_number, positions, module, given
            )
            for position in positions:
                value = self._program.arguments[position].value
                arrays[position] = Copy(mesh=mesh, value=value, key=(call_number, position))
        return self._signature.created(
            numbers,
            arrays,
            partial(self._array, calls, self._argument_shape, self._is_weak_argument),
        )

    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        call_number, by_number = self._group.next_number(), dict(zip(numbers, stored, strict=True))
        arrays: dict[int, Copy] = {}
        calls: dict[str, Call] = {}
        for mesh, positions in self._signature.wanted(numbers).items():
            parts: dict[int, tuple[StoredArray, Slice | None]] = {}
            for position in positions:
                argument = self._program.arguments[position]
                parts[position] = by_number[argument.number], argument.attributes.slice
                key = (call_number, position)
                arrays[position] = Copy(mesh=mesh, value=argument.value, key=key)
            calls[mesh] = self._group.call(mesh, "restore", self._loaded, call_number, parts)
        restored = self._signature.created(
            numbers,
            arrays,
            partial(self._array, calls, self._argument_shape, self._is_weak_argument),
        )
        wait_for(calls.values(), "checkpoint_timeout_seconds")
        return restored

    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        feeds: dict[str, dict[int, ArrayId | int]] = {m.name: {} for m in self._program.meshes}
        sent: dict[str, list[np.ndarray]] = {mesh.name: [] for mesh in self._program.meshes}
        donated: list[RemoteArray] = []
        for position, argument in enumerate(self._program.arguments):
            given = arguments[argument.number]
            if not isinstance(given, PlacedArgument):
                given = self._signature.part(argument, given)
            mesh = self._program.values[argument.value].mesh
            copy = None
            if isinstance(given, PlacedArgument):
                copy = given.copy_for(argument)
            elif isinstance(given, RemoteArray):
                copy = given.copy_on(self._group, mesh, argument.value)
                if is_donated(argument):
                    donated.append(given)
            if copy is not None:
                feeds[mesh][position] = copy.key
            else:
                feeds[mesh][position] = len(sent[mesh])
                sent[mesh].append(np.asarray(given))
        # An interrupt of these waits leaves the arguments as they are, and nothing half done.
        while self._placing:
            self._placing[0].wait()
            self._placing.popleft()
        self._wait_until_fewer_than(self._group.options.steps_ahead)
        with held_back():  # Meshes that get no order would keep the others waiting.
            for array in donated:
                array.delete()
            step = self._ordered(feeds, sent)
            results = self._results(step)
        if self._trace is not None:
            times = (it for them in self.wait().values() for it in them)
            self._trace.add([it.spans for it in times if it.spans is not None])
        return results

    def _ordered(
        self, feeds: Mapping[str, dict[int, ArrayId | int]], sent: Mapping[str, list[np.ndarray]]
    ) -> _Step:
        """Orders a step from all meshes."""
        step = _Step(self._group.next_number())
        for mesh, sources in feeds.items():
            call = StepCall(
                program=self._loaded,
                number=step.number,
                feeds=sources,
                free=self._group.collect(mesh),
                traced=self._trace is not None,
            )
            step.calls[mesh] = self._group.call(mesh, "step", call, *sent[mesh])
        self._under_way.append(step)
        return step

    def _wait_until_fewer_than(self, count: int) -> dict[str, list[StepTimes]]:
        """Waits for the oldest steps; returns the seconds of the last of them, by mesh."""
        times: dict[str, list[StepTimes]] = {}
        while len(self._under_way) >= count:
            times = self._under_way[0].wait()
            self._under_way.popleft()
        return times

    def wait(self) -> dict[str, list[StepTimes]]:
        """Waits for all steps; returns the seconds of each mesh's workers in the last one.

        Raises:
            WorkerError: one of them has failed.
        """
        return self._wait_until_fewer_than(1)

    def held_bytes(self) -> dict[str, int]:
        """Bytes that the devices of each mesh hold between steps; waits for all steps."""
        self.wait()
        return {
            mesh.name: sum(
                self._group.call(mesh.name, "held_bytes", self._group.collect(mesh.name)).wait()
            )
            for mesh in self._program.meshes
        }

    def usage(self) -> dict[str, ProcessUsage]:
        return super().usage() | self._group.usage()

    def close(self) -> None:
        """Stops the workers and releases their resources; the arrays are lost.

        Executables that share the workers are closed, too. A save in the background is completed
        first.
        """
        if not self._group.is_stopped:
            background().settle()
        self._group.close(
            f"{CLOSED}. The arrays of its workers are lost with it: restore the state from a "
            "checkpoint (alpa.resume), or create it again (alpa.create_state)"
        )

    def _lowered(self, function: Callable[[], Any], mesh: str, positions: Sequence[int]) -> bytes:
        """Lowers a function without arguments for a mesh, with results placed like arguments."""
        (axes,) = (abstract_mesh(it) for it in self._program.meshes if it.name == mesh)
        values = [self._program.values[self._program.arguments[p].value] for p in positions]
        traced = jax.jit(function, out_shardings=[sharding_of(it, axes) for it in values]).trace()
        lowered = traced.lower(lowering_platforms=(self._group.lowering_platform,))
        module = cast(ir.Module, lowered.compiler_ir("stablehlo"))
        refuse_host_calls(module)
        return bytecode(module.operation)

    def _results(self, step: _Step) -> tuple[Any, ...]:
        copies: list[Copy] = []
        for position, output in enumerate(self._script.outputs):
            mesh = self._program.values[output.value].mesh
            copies.append(Copy(mesh=mesh, value=output.value, key=(step.number, position)))
        parts = self._signature.copies(copies)
        return self._signature.join(
            {
                part: self._array(step.calls, self._result_shape, self._is_weak_result, it)
                for part, it in parts.items()
            }
        )

    def _array(
        self,
        calls: Mapping[str, Call],
        shape: Callable[[Copy], Sequence[int]],
        is_weak: Callable[[Copy], bool],
        copies: list[Copy],
    ) -> RemoteArray:
        """The array from calls on meshes, with its copies there."""
        first = copies[0]
        dtype = numpy_dtype(self._program.values[first.value].dtype)
        call, it = calls[first.mesh], tuple(shape(first))
        return RemoteArray(self._group, call, it, dtype, copies, is_weak(first))

    def _is_weak_argument(self, copy: Copy) -> bool:
        return self._program.arguments[copy.key[1]].number in self.weak_arguments

    def _is_weak_result(self, copy: Copy) -> bool:
        return self._program.results[copy.key[1]].number in self.weak_results

    def _argument_shape(self, copy: Copy) -> Sequence[int]:
        return self._program.values[copy.value].shape

    def _result_shape(self, copy: Copy) -> Sequence[int]:
        shape, output = list(self._argument_shape(copy)), self._script.outputs[copy.key[1]]
        if output.concat is not None:
            shape[output.concat] *= len(output.keys)
        return shape


class _Step:
    """The calls of one step by mesh."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: dict[str, Call] = {}

    def wait(self) -> dict[str, list[StepTimes]]:
        return {mesh: call.wait() for mesh, call in self.calls.items()}


class _Stage:
    """A compiled fragment on a mesh."""

    def __init__(self, group: WorkerGroup, program: int, fragment: Fragment) -> None:
        self._group, self._mesh = group, fragment.mesh
        self._key = (program, module_name(fragment))

    @property
    def read_from(self) -> Path | None:
        return self._group.call(self._mesh, "read_from", *self._key).wait()[0]

    def hlo_text(self) -> str:
        return self._group.call(self._mesh, "hlo_text", *self._key).wait()[0]

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(**self._group.call(self._mesh, "memory", *self._key).wait()[0])
