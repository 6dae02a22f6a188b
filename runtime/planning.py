"""Plans one program: the passes of `alpa` one by one, with their seconds, and the schedule.

    clock = Clock()
    planned = plan(parse_file("step.mlir"), Settings(cluster="cpu:2x4"), clock)
    planned.plan.predicted_step_seconds, clock.seconds["ilp-shard-annotate"]

**Which schedule.** 1F1B keeps at most as many micro-batches in flight as GPipe on each stage, and
both run the same work in as many rounds. So what GPipe can do within the memory, 1F1B can do as
well: it is planned first, and if it cannot be planned, neither can GPipe. With one micro-batch or
one stage the two take the same time, and GPipe is not planned. Else GPipe's stages are cut as well;
only where `stage-mesh-partition` predicts a shorter step for them is it planned to the end, and
kept if its step is still the shorter one.

**Where a stage does not fit.** Stages are cut by estimates of their memory. Where
`ilp-shard-annotate` finds no room for one, they are cut again with what was missing, and a little
more, kept in reserve, then with twice that at least, up to `_CUTS` times in all. A remark says so,
and the first error remains the answer if no cut fits.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from alpa import passes
from alpa.dialects import ir, main_function
from alpa.dialects.attributes import PROGRAM, AccumulateDtype, Plan, Schedule, State, read_meshes
from alpa.dialects.sharding import Sharding
from alpa.passes import pipeline
from alpa.passes.analysis.plan_report import PlanReport
from alpa.passes.base import NoRoomError
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, listening, place_of
from alpa.passes.pipelines.text import element_text
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.remat import Remat
from alpa.runtime.sharing import Places, write_held

Inter = Literal["auto", "none", "equal-layers", "equal-ops"]

_SHARED = pipeline.PIPELINES["alpa"][:4]
"""The passes that know neither cluster nor schedule."""

_CUTS = 5
_MORE = 0.01
"""Of a device's memory, to reserve beside what was missing."""


class PlanningError(Exception):
    """A program cannot be planned; `str` is what a compiler would print."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...], missing: float | None = None) -> None:
        super().__init__("\n".join(map(str, diagnostics)))
        self.diagnostics = diagnostics
        self.missing = missing
        """the share of a device's memory that a mesh lacks, where that is why (`NoRoomError`)"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to plan for; `inter` and `intra` restrict the search to a baseline of the paper.

    `mesh_shape` is the logical shape of every mesh, such as `4x2`, where it is not searched.
    `meshes` gives the meshes themselves, so that `inter` says no more how many there are, and
    `held` where on them states lie already (`runtime/sharing.py`).
    """

    cluster: str
    num_micro_batches: int = 1
    micro_batches: Literal["auto", "exact", "independent"] = "auto"
    schedule: Literal["auto"] | Schedule = "auto"
    intra: Intra = "auto"
    inter: Inter = "auto"
    remat: Remat = "auto"
    mesh_shape: str = "auto"
    meshes: str = "auto"
    held: Places = field(default_factory=dict[State, tuple[Sharding, ...]])
    objective: Literal["step", "throughput"] = "step"
    accumulate_dtype: AccumulateDtype = "f32"

    def options(self, schedule: Schedule) -> dict[str, str]:
        """The options of the passes, by their names with dashes."""
        inter: dict[Inter, dict[str, str]] = {
            "auto": {},
            "none": {"num-stages": "1"},
            "equal-layers": {"equal-layers": "true"},
            "equal-ops": {"clustering": "equal-ops"},
        }
        if self.meshes != "auto":
            stages = {"clustering": "equal-ops"} if self.inter == "equal-ops" else {}
            stages["meshes"] = self.meshes
        else:
            stages = {**inter[self.inter], "mesh-shape": self.mesh_shape}
        return {
            "cluster": self.cluster,
            "num-micro-batches": str(self.num_micro_batches),
            "micro-batches": self.micro_batches,
            "schedule": schedule,
            "intra": self.intra,
            "remat": self.remat,
            "objective": self.objective,
            "accumulate-dtype": self.accumulate_dtype,
            **stages,
        }

    def clustering(self) -> dict[str, str]:
        """Those of the options that `clustered` depends on."""
        kinds = [pipeline.load_pass(name) for name in _SHARED]
        known = {name for kind in kinds for name in kind.option_fields()}
        return {name: value for name, value in self.options("1f1b").items() if name in known}

    def check(self) -> None:
        """Raises PlanningError where an option is asked for that no pass has."""
        kinds = [pipeline.load_pass(name) for name in pipeline.PIPELINES["alpa"]]
        known = {name for kind in kinds for name in kind.option_fields()}
        for name, value in self.options("1f1b").items():
            if name not in known:
                problem = f"no pass has an option {name} that could be {value}"
                raise PlanningError((Diagnostic("error", Place("alpa"), problem),))


class Clock:
    """Adds up the seconds of phases by name; `on_phase` hears when one begins."""

    def __init__(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """One phase, also where it ends by an exception."""
        self._on_phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned module, and what the passes remarked on the way."""

    module: ir.Module
    plan: Plan
    objective: float
    """T of the stages, in seconds, by the costs that they were cut by (`solve/stage_dp.py`); where
    there was nothing to choose, a bound of it"""
    remarks: tuple[Diagnostic, ...]

    def report(self, clock: Clock) -> PlanReport:
        """The plan in numbers, with the seconds of all phases until now."""
        with clock.phase("report"):
            report = PlanReport.of(self.module)
        return report.searched(clock.seconds)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A module on its way through the passes. Every step works on a copy."""

    module: ir.Module
    settings: Settings
    clock: Clock
    remarks: tuple[Diagnostic, ...] = ()
    reserve: float = 0.0
    """share of each device's memory that stages leave free"""

    def after(self, names: tuple[str, ...], schedule: Schedule) -> _Draft:
        """What these passes make of it. Raises PlanningError."""
        buffer = io.BytesIO()
        self.module.operation.write_bytecode(buffer)
        copy = ir.Module.parse(buffer.getvalue(), self.module.context)
        remarks = list(self.remarks)
        options = self.settings.options(schedule) | {"reserve": str(self.reserve)}
        for name in names:
            remarks += run_pass(name, options, copy, self.clock)
        return replace(self, module=copy, remarks=tuple(remarks))

    @property
    def plan(self) -> Plan:
        """The plan as it is now; after `stage-mesh-partition`."""
        return Plan.read(main_function(self.module)) or Plan()

    def planned(self, objective: float) -> Planned:
        return Planned(
            module=self.module, plan=self.plan, objective=objective, remarks=self.remarks
        )


def clustered(module: ir.Module, settings: Settings, clock: Clock) -> ir.Module:
    """A copy of a program, cut into layers; `alpa.program` says of which program it is, and
    `alpa.held` where its arguments lie.

    Raises:
        PlanningError: a pass cannot go on, or none has an option that is asked for.
    """
    settings.check()
    draft = _Draft(module=module, settings=settings, clock=clock).after(_SHARED, "1f1b")
    with draft.module.context:
        name = ir.StringAttr.get(fingerprint(module))
    draft.module.operation.attributes[PROGRAM] = name
    with draft.module.context:
        write_held(main_function(draft.module), settings.held)
    return draft.module


def fingerprint(module: ir.Module) -> str:
    """What a plan remembers of the program that it was made for: a hash of its text."""
    text = cast(str, module.operation.get_asm(enable_debug_info=False))
    return hashlib.sha256(text.encode()).hexdigest()


def planned_for(module: ir.Module) -> str | None:
    """The fingerprint of the program that a planned module was made for, if it tells."""
    attr = module.operation.attributes.get(PROGRAM)
    return attr.value if isinstance(attr, ir.StringAttr) else None


def plan(module: ir.Module, settings: Settings, clock: Clock) -> Planned:
    """Plans a program, which stays as it is.

    Raises:
        PlanningError: a pass cannot go on, or none has an option that is asked for.
    """
    return plan_clustered(clustered(module, settings, clock), settings, clock)


def plan_clustered(module: ir.Module, settings: Settings, clock: Clock) -> Planned:
    """As `plan`, for what `clustered` made."""
    return _scheduled(_Draft(module=module, settings=settings, clock=clock))


def _scheduled(draft: _Draft) -> Planned:
    """The plan under the schedule that is asked for, or the better one (see above)."""
    cut, *rest = pipeline.PIPELINES["alpa"][len(_SHARED) :]
    settings = draft.settings
    first: Schedule = "1f1b" if settings.schedule == "auto" else settings.schedule
    best = _fitting(draft, first)
    objective = best.objective
    if settings.schedule != "auto" or settings.num_micro_batches == 1:
        return best
    if len(read_meshes(main_function(best.module))) == 1:
        return best
    try:
        other = draft.after((cut,), "gpipe")
        if other.plan.predicted_step_seconds >= objective:
            return best
        planned = other.after(tuple(rest), "gpipe").planned(other.plan.predicted_step_seconds)
    except PlanningError:
        return best  # It does not fit into memory.
    faster = planned.plan.predicted_step_seconds < best.plan.predicted_step_seconds
    return planned if faster else best


def _fitting(draft: _Draft, schedule: Schedule) -> Planned:
    """The plan of stages that have room (see above). Raises PlanningError."""
    cut, *rest = pipeline.PIPELINES["alpa"][len(_SHARED) :]
    refused: PlanningError | None = None
    for _ in range(_CUTS):
        try:
            stages = draft.after((cut,), schedule)
        except PlanningError as error:
            raise refused or error from None
        try:
            return stages.after(tuple(rest), schedule).planned(stages.plan.predicted_step_seconds)
        except PlanningError as error:
            if error.missing is None:
                raise
            refused = refused or error
            reserve = draft.reserve + max(draft.reserve, error.missing + _MORE)
            draft = replace(
                draft, reserve=reserve, remarks=(*draft.remarks, _again(error, reserve))
            )
    assert refused is not None
    raise refused


def _again(error: PlanningError, reserve: float) -> Diagnostic:
    (first, *_) = error.diagnostics
    reason = first.message.partition(";")[0]
    text = f"{reason}: stages are cut again with reserve={reserve:.3f}"
    return Diagnostic("remark", first.place, text)


def run_pass(
    name: str, options: dict[str, str], module: ir.Module, clock: Clock
) -> list[Diagnostic]:
    """Runs one pass in place, with those of the options that it has; its remarks.

    Raises:
        PlanningError: the pass cannot go on.
    """
    known = pipeline.load_pass(name).option_fields()
    text = element_text(name, {key: value for key, value in options.items() if key in known})
    said: list[Diagnostic] = []
    failed: list[passes.PassError] = []

    def remark(location: ir.Location, message: str) -> None:
        said.append(Diagnostic("remark", place_of(location), message))

    with clock.phase(name), listening(module.context, said.append):
        try:
            passes.run(module, text, on_remark=remark, on_error=failed.append)
        except ir.MLIRError as error:
            problems = [one for one in said if one.severity in ("error", "note")]
            room = next((one for one in failed if isinstance(one, NoRoomError)), None)
            raise PlanningError(
                tuple(problems) or (Diagnostic("error", Place(name), error.message),),
                missing=None if room is None else room.missing,
            ) from error
    return said
