"""A step that is lowered, planned and compiled when first needed."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alpa import passes
from alpa.dialects import ir, is_bytecode, parse, parse_file
from alpa.passes.alpa import fingerprint, planned_for
from alpa.passes.base import NoRoomError
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.passes.stages.policy import OVER_HOSTS
from alpa.runtime.ambient_mesh import without_mesh
from alpa.runtime.argument_checks import Placed, check_donations, check_usable
from alpa.runtime.batches import placed_batch
from alpa.runtime.calls import Call, Leaf, ResultLeaf
from alpa.runtime.cut_array import CutArray
from alpa.runtime.executable import Executable
from alpa.runtime.keepers import not_finite
from alpa.runtime.loading import load, refusing
from alpa.runtime.micro_batches import best_number, divisors
from alpa.runtime.planning import Planned, PlanningError, Settings, plan
from alpa.runtime.progress import progress
from alpa.runtime.questions.explain import explain
from alpa.runtime.questions.explanation import Explanation
from alpa.runtime.sharing import PlannedState
from alpa.runtime.step import Lowered, Step
from alpa.runtime.step_plan import StepPlan
from alpa.runtime.target import Target

_logger = logging.getLogger("alpa")
_SHOWN = 5  # results that an error lists


class PlanMismatchError(ValueError):
    """A saved plan was made for another program."""


class Prepared:
    """The lowered, planned and compiled step for the calls of one key, each made when needed."""

    def __init__(self, step: Step, target: Target) -> None:
        self.step = step
        self.settings = target.settings
        self._target = target
        self._loaded: Executable | None = None
        self._calls = 0
        self._given: Settings | None = None
        """what the plan was searched with, but for the number of micro-batches"""
        self._asked: Planned | None = None
        """the plan with what questions about it need"""

    @cached_property
    def _lowered_and_plan(self) -> tuple[Lowered, StepPlan]:
        if self._target.explain_roles:
            sys.stdout.write(f"{self.step.explanation()}\n")
        found = self._read(target.saved) if (target := self._target).saved else self._search()
        if target.leads:
            arrays = self.step.call.arrays
            state = {n: arrays[n] for n in self.step.state}
            target.family.states.append(PlannedState.of(found[1].module, state))
        return found

    def _search(self) -> tuple[Lowered, StepPlan]:
        """Searches a plan, for the meshes of the state that the step takes, if there are any."""
        with self._shown(f"plan {self.step.name}") as clock:
            return self._searched(clock)

    @contextmanager
    def _shown(self, name: str) -> Generator[Clock]:
        """Returns a clock whose phases a terminal shows."""
        with progress(name) as show:

            def show_phase(what: str, done: int = 0, total: int = 0) -> None:
                show(f"{name}: {what}", done, total)

            yield Clock(show_phase)

    def _searched(self, clock: Clock) -> tuple[Lowered, StepPlan]:
        target = self._target
        possible = target.capabilities()
        given = replace(self._settings_on_meshes(), capabilities=possible)
        self._given = given
        if target.num_micro_batches == "auto":
            numbers = divisors(self.step.batch_size or 1)
        else:
            numbers = [target.num_micro_batches]
        lowered: dict[int, Lowered] = {}

        def lower(number: int) -> ir.Module:
            lowered[number] = self.lower(number)
            return lowered[number].module

        planned: Planned
        if len(numbers) == 1:
            settings = replace(given, num_micro_batches=numbers[0])
            try:
                planned = plan(lower(numbers[0]), settings, clock)
            except PlanningError as error:
                numbers = self._smaller(numbers[0])
                if not numbers or not isinstance(error.reason, NoRoomError):
                    raise
                planned = best_number(numbers, lower, given, clock).planned
                _logger.warning(
                    "%s takes %d micro-batches for %s, not %d: larger ones do not fit",
                    self.step.name,
                    planned.plan.num_micro_batches,
                    settings.cluster,
                    settings.num_micro_batches,
                )
        else:
            planned = best_number(numbers, lower, given, clock).planned
        for remark in planned.remarks:
            _logger.info("%s", remark)
        if any(one.what == OVER_HOSTS for one in planned.plan.dropped):
            _logger.warning(
                "%s is planned without meshes over several hosts: %s",
                self.step.name,
                possible.reason,
            )
        report = planned.numbers(clock)
        found = self._plan_of(planned.module, report)
        return lowered[planned.plan.num_micro_batches], found

    def explain(self, what: str) -> tuple[Explanation, ...]:
        """As `StepPlan.explain`, without printing."""
        if self._target.saved is not None:
            raise ValueError(
                f"the plan was read from {self._target.saved}, and only a search can be asked; "
                "leave out plan=, or use alpa-plan --explain on the program"
            )
        with self._shown(f"explain {what}") as clock:
            return explain(what, self._kept(clock), clock)

    def _kept(self, clock: Clock) -> Planned:
        """The plan, once more, with what questions need."""
        if self._asked is None:
            lowered, number = self.lowered, self.plan.num_micro_batches
            assert self._given is not None, "the plan was searched"
            settings = replace(self._given, num_micro_batches=number)
            self._asked = plan(lowered.module, settings, clock, keep=True)
        return self._asked

    def _plan_of(self, module: ir.Module, report: PlanReport) -> StepPlan:
        return StepPlan(
            module=module,
            roles=self.step.explanation(),
            step=weakref.ref(self),
            **vars(report),
        )

    def _smaller(self, number: int) -> list[int]:
        """The numbers of micro-batches with smaller ones, which may be taken where hosts are lost.

        They compute the same, so independent micro-batches are not among them.
        """
        target = self._target
        is_whole = self.settings == target.named
        if is_whole or target.micro_batches != "exact" or self._batch_is_guessed:
            return []
        return [n for n in divisors(self.step.batch_size or 1) if n > number]

    @property
    def _batch_is_guessed(self) -> bool:
        """One micro-batch does not need the batch, so state can look like the batch then."""
        return self._target.num_micro_batches == 1 and self.step.declared.batch is None

    def _settings_on_meshes(self) -> Settings:
        """The settings, with the meshes of the plan whose state the step takes, and its shardings.

        A function that is like another one always gets the other's meshes.
        """
        target, settings, step = self._target, self.settings, self.step
        if not target.leads:  # The layers and arguments are those of another function.
            settings = replace(settings, num_layers="auto", force=())
        batch = () if self._batch_is_guessed else step.batch
        leaves = {n: leaf for n, leaf in enumerate(step.call.arrays) if n not in batch}
        for state in reversed(target.family.states):
            if state.cluster != settings.cluster or state.option is None:
                continue
            held = state.held_by(leaves)
            if held or not target.leads:
                return replace(settings, meshes=state.option, held=held)
        return settings

    def _read(self, path: str | Path) -> tuple[Lowered, StepPlan]:
        """Reads a saved plan, and lowers the step at its micro-batch size.

        Raises:
            ir.MLIRError, LoadError: the file is not a plan.
            PlanMismatchError: it was made for another program or another batch.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"there is no plan {path}; save one by {self.step.name}.plan(...).save(path)"
            )
        with open(path, "rb") as file:
            if is_bytecode(file.read(4)):
                # Damaged bytecode can crash MLIR's reader, and with it the process.
                raise PlanMismatchError(
                    f"{path} is bytecode, but a saved plan must be text; write it with alpa-opt"
                )
        module = parse_file(path)
        with refusing():
            report = PlanReport.of(module)
        try:
            lowered = self.lower(report.num_micro_batches)
        except ValueError as error:
            raise PlanMismatchError(
                f"{path} was planned for {report.num_micro_batches} micro-batches: {error}"
            ) from error
        made_for, this = planned_for(module), fingerprint(lowered.module)
        if made_for != this:
            raise PlanMismatchError(
                f"{path} was planned for another program ({(made_for or 'unknown')[:12]}) than "
                f"{self.step.name} is for these arguments ({this[:12]}): the function, the shapes, "
                "or the version of JAX have changed; plan it again"
            )
        return lowered, self._plan_of(module, report)

    @property
    def target(self) -> Target:
        """What the step is planned for."""
        return self._target

    def lower(self, number: int) -> Lowered:
        """The step as StableHLO, lowered for `number` micro-batches."""
        target = self._target
        return self.step.lower(number, target.loss_reduction, target.lowering_platform())

    @property
    def lowered(self) -> Lowered:
        """The step as StableHLO, lowered for the plan's micro-batches."""
        return self._lowered_and_plan[0]

    @property
    def plan(self) -> StepPlan:
        """The plan of the step, searched or read."""
        return self._lowered_and_plan[1]

    @property
    def executable(self) -> Executable:
        """The compiled step; failed workers are replaced by new ones.

        Raises ValueError if the cluster has more devices than this process.
        """
        if self._loaded is None or self._loaded.is_stopped:
            self._target.check_devices()
            self._loaded = self._load()
        return self._loaded

    def close(self) -> None:
        """Ends the workers of the step, if there are any. A later call starts new ones."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _load(self) -> Executable:
        target = self._target
        family = target.family
        family.executables[:] = [it for it in family.executables if not it.is_stopped]
        module = self.plan.module
        independent = self.lowered.num_micro_batches > 1 and target.micro_batches == "independent"
        if independent and target.loss_reduction == "sum":
            module = parse(str(module), module.context)
            passes.run(module, f"export-stages{{loss-reduction={target.loss_reduction}}}")
        executable = load(
            module,
            target.executor,
            target.devices,
            compiler_options=target.compiler_options,
            workers=target.workers,
            executables=target.executables,
            beside=family.executables,
        )
        executable.weak_arguments = _weak(self.step.call.arrays)
        executable.weak_results = _weak(self.lowered.traced.results)
        if target.executor == "ray":  # Others may run in its actors.
            family.executables.append(executable)
        return executable

    @cached_property
    def _sliced(self) -> frozenset[int]:
        """The arguments that the program takes in slices."""
        arguments = self.executable.program.arguments
        return frozenset(a.number for a in arguments if a.attributes.slice is not None)

    def run(self, call: Call) -> Any:
        """Runs the step.

        Raises:
            TypeError, RuntimeError: an argument is only a shape, was deleted or donated, or is
                donated twice.
            FloatingPointError: a result is not finite, and the target checks that.
        """
        self._check(call)  # before planning, and before new workers, which would lack the arrays
        executable, lowered = self.executable, self.lowered
        with without_mesh():
            arguments = lowered.arguments(call)
            for n, array in enumerate(arguments):
                if not isinstance(array, CutArray | Placed):
                    continue
                if isinstance(array, Placed):
                    self._check_placed(executable, n, array)
                elif n not in self._sliced:
                    arguments[n] = np.asarray(array)
        with self._target.family.lost.step(call.values), without_mesh():
            results = executable.run(arguments)  # the call's key fixes the types
            self._calls += 1
            if self._target.check_finite:
                self._check_finite(results)
            return lowered.result(results)

    def place(self, batch: Any) -> Any | None:
        """A batch with its arrays where the step reads them; see `batches.placed_batch`."""

        def place(number: int, array: Any) -> Any:
            executable, lowered = self.executable, self.lowered
            if number in lowered.whole:  # The step reads it in two places.
                return array
            with without_mesh():
                return executable.place(number, lowered.argument(number, array))

        return placed_batch(self.step, batch, place)

    def _check_placed(self, executable: Executable, number: int, placed: Placed) -> None:
        if not executable.has_placed(number, placed):
            raise ValueError(
                f"{self.step.call.arrays[number].label} was placed for another argument or step, "
                "or for workers that have ended; place the batch again (alpa.runtime.prefetch)"
            )

    def _check(self, call: Call) -> None:
        arrays = self.step.arrays(call)

        def label(number: int) -> str:
            return call.arrays[number].label

        check_usable(arrays, label, self._target.family.lost)
        check_donations(arrays, self._donated, label)

    @cached_property
    def _donated(self) -> frozenset[int]:
        """The arguments whose buffers the step uses for their new values."""
        step = self.step
        donated = step.declared.donated
        return frozenset(n for n in step.state if step.call.arrays[n].argument in donated)

    def _check_finite(self, results: Sequence[Any]) -> None:
        wrong = not_finite(results)
        if not wrong:
            return
        labels = [self.lowered.traced.results[n].label for n in wrong]
        more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
        raise FloatingPointError(
            f"call {self._calls} of {self.step.name}: {len(wrong)} of its {len(results)} results "
            f"hold NaN or infinity: {', '.join(labels[:_SHOWN])}{more}; restore an earlier "
            "checkpoint (alpa.restore), and use a smaller learning rate or other data"
        )


def _weak(leaves: Iterable[Leaf | ResultLeaf]) -> frozenset[int]:
    """The numbers of the arrays that are weakly typed."""
    return frozenset(n for n, leaf in enumerate(leaves) if leaf.type is not None and leaf.type.weak)
