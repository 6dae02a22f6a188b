"""The caller's side of a plan on Ray: one call per mesh and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpa.passes.analysis.planned import Program
from alpa.runtime.executable import Executable, Stage
from alpa.runtime.instructions import write_script
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.placement import numpy_dtype
from alpa.runtime.signature import Signature, is_donated
from alpa.runtime.stages import module_name
from alpa.runtime.workers.group import Call, WorkerGroup
from alpa.runtime.workers.options import WorkerOptions
from alpa.runtime.workers.remote_array import Copy, PlacedArgument, RemoteArray
from alpa.runtime.workers.worker import ArrayId, StepCall, StepTimes


class RayExecutable(Executable):
    """Runs each mesh's own list in actors. Results are `RemoteArray`s.

    A call returns as soon as the workers have their orders; a failure shows where its results are
    looked at, or at a later call. The workers live until `close`, or until nobody holds the
    executable or an array of it.
    """

    def __init__(
        self,
        program: Program,
        modules: Mapping[str, bytes],
        options: WorkerOptions,
        compiler_options: CompilerOptions | None = None,
    ) -> None:
        self._program = program
        self._script = write_script(program)
        self._signature = Signature(program)
        self._group = WorkerGroup(self._script, modules, options, compiler_options)
        self._number = 0
        self._under_way: deque[_Step] = deque()
        self._placing: deque[Call] = deque()
        self._stages = {module_name(f): _Stage(self._group, f.mesh, f) for f in program.fragments}

    @property
    def program(self) -> Program:
        return self._program

    @property
    def stages(self) -> Mapping[str, Stage]:
        return self._stages

    def place(self, number: int, array: Any) -> PlacedArgument:
        """As of every executable; returns at once, and the next steps wait for it.

        The workers put it on their devices while a step is running.
        """
        self._number += 1
        copies: list[Copy] = []
        for position in self._signature.positions(number):
            argument = self._program.arguments[position]
            given = np.asarray(self._signature.part(argument, array))
            mesh = self._program.values[argument.value].mesh
            key = (self._number, position)
            self._placing.append(self._group.call(mesh, "place", key, given))
            copies.append(Copy(mesh=mesh, value=argument.value, key=key))
        return PlacedArgument(self._group, number, np.shape(array), np.asarray(array).dtype, copies)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        self._signature.check_number(arguments)
        feeds: dict[str, dict[int, ArrayId | int]] = {m.name: {} for m in self._program.meshes}
        sent: dict[str, list[np.ndarray]] = {mesh.name: [] for mesh in self._program.meshes}
        donated: dict[int, tuple[int, RemoteArray]] = {}
        for position, argument in enumerate(self._program.arguments):
            given = arguments[argument.number]
            if not isinstance(given, PlacedArgument):
                given = self._signature.part(argument, given)
            mesh = self._program.values[argument.value].mesh
            copy = None
            if isinstance(given, PlacedArgument):
                copy = given.copy_for(self._group, argument)
            elif isinstance(given, RemoteArray):
                given.check_alive()
                copy = given.copy_on(self._group, mesh, argument.value)
                if is_donated(argument):
                    number, _ = donated.setdefault(id(given), (argument.number, given))
                    if number != argument.number:
                        raise ValueError(
                            f"arguments {number} and {argument.number} are one array, and donated"
                        )
            if copy is not None:
                feeds[mesh][position] = copy.key
            else:
                feeds[mesh][position] = len(sent[mesh])
                sent[mesh].append(np.asarray(given))
        while self._placing:
            self._placing.popleft().wait()
        while len(self._under_way) >= self._group.options.steps_ahead:
            self._under_way.popleft().wait()
        for _, array in donated.values():
            array.delete()
        self._number += 1
        step = _Step()
        for mesh, sources in feeds.items():
            call = StepCall(number=self._number, feeds=sources, free=self._group.collect(mesh))
            step.calls[mesh] = self._group.call(mesh, "step", call, *sent[mesh])
        self._under_way.append(step)
        return self._results(step)

    def wait(self) -> dict[str, list[StepTimes]]:
        """Waits for all steps; of the last one, the seconds of each mesh's workers.

        Raises:
            WorkerError: one of them has failed.
        """
        times: dict[str, list[StepTimes]] = {}
        while self._under_way:
            times = self._under_way.popleft().wait()
        return times

    def held_bytes(self) -> dict[str, int]:
        """Bytes that the devices of each mesh hold between steps; waits for all of these."""
        self.wait()
        return {
            mesh.name: sum(
                self._group.call(mesh.name, "held_bytes", self._group.collect(mesh.name)).wait()
            )
            for mesh in self._program.meshes
        }

    def close(self) -> None:
        """Stops the workers and gives their places back; the arrays are lost."""
        self._group.close()

    def __enter__(self) -> RayExecutable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _results(self, step: _Step) -> tuple[Any, ...]:
        copies: list[Copy] = []
        for position, output in enumerate(self._script.outputs):
            value = output.keys[0][0]
            mesh = self._program.values[value].mesh
            copies.append(Copy(mesh=mesh, value=value, key=(self._number, position)))
        arrays: dict[Any, RemoteArray] = {}
        for part, them in self._signature.copies(copies).items():
            value = self._program.values[them[0].value]
            shape = list(value.shape)
            output = self._script.outputs[them[0].key[1]]
            if output.concat is not None:
                shape[output.concat] *= len(output.keys)
            dtype = numpy_dtype(value.dtype)
            call = step.calls[them[0].mesh]
            arrays[part] = RemoteArray(self._group, call, tuple(shape), dtype, them)
        return self._signature.join(arrays)


class _Step:
    """The calls of one step by mesh."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}

    def wait(self) -> dict[str, list[StepTimes]]:
        return {mesh: call.wait() for mesh, call in self.calls.items()}


class _Stage:
    """A compiled fragment on a mesh."""

    def __init__(self, group: WorkerGroup, mesh: str, fragment: Any) -> None:
        self._group, self._mesh, self._name = group, mesh, module_name(fragment)

    def hlo_text(self) -> str:
        return self._group.call(self._mesh, "hlo_text", self._name).wait()[0]

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(**self._group.call(self._mesh, "memory", self._name).wait()[0])
