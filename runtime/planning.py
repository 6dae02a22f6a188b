"""Plans a program with the pipeline `alpa`, and records the passes' seconds and remarks.

clock = Clock()
planned = plan(parse_file("step.mlir"), Settings(cluster="cpu:2x4"), clock)
planned.plan.predicted_step_seconds, clock.seconds["ilp-shard-annotate"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from alpa import passes
from alpa.dialects import ir, main_function, separate
from alpa.dialects.attributes import State
from alpa.dialects.plan import AccumulateDtype, Plan
from alpa.dialects.sharding import Sharding
from alpa.passes import pipeline
from alpa.passes.alpa import Alpa, Kept
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import MeshOverHostsError, Pass, PassError, kept, location_of
from alpa.passes.import_hlo import without_tuples
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, listening, place_of
from alpa.passes.pipelines.text import element_text
from alpa.passes.plan.report import PlanReport
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.forced_shardings import write_forced
from alpa.passes.stages.given_meshes import Places, write_held
from alpa.passes.stages.remat import Remat
from alpa.passes.tried import Tried
from alpa.runtime.choices import (
    Choice,
    ChoiceError,
    fixed_stages,
    forced_schedule,
    forced_shardings,
    parse_choice,
)

Inter = Literal["auto", "none", "equal-layers", "equal-ops"]
Count = int | Literal["auto"]


class PlanningError(Exception):
    """A program cannot be planned; `str` is the compiler's error message."""

    def __init__(
        self, diagnostics: tuple[Diagnostic, ...], reason: PassError | None = None
    ) -> None:
        super().__init__("\n".join(map(str, diagnostics)))
        self.diagnostics = diagnostics
        self.reason = reason
        """the error of the pass that refused the program, if any"""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the executor of a plan can run. The search keeps to it."""

    meshes_over_hosts: bool = True
    """whether a mesh may span several hosts"""
    reason: str = ""
    """why something is not possible, for messages"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a plan; `inter` and `intra` restrict the search to a baseline of the paper.

    `mesh_shape` fixes the logical shape of every mesh, such as `4x2`. `meshes` fixes the meshes
    themselves, so `inter` and `num_stages` do not set their number. `held` gives the states'
    shardings on these meshes (`runtime/sharing.py`). `force` are choices that the plan must have
    (`runtime/choices.py`).

    Raises:
        ValueError: `inter` is none, and `num_stages` more than one; or a text of `force` is no
            choice, or is another schedule than `schedule`.
    """

    cluster: str
    num_micro_batches: int = 1
    micro_batches: Literal["auto", "exact", "independent"] = "auto"
    schedule: str = "auto"
    intra: Intra = "auto"
    inter: Inter = "auto"
    num_stages: Count = "auto"
    num_layers: Count = "auto"
    remat: Remat = "auto"
    mesh_shape: str = "auto"
    meshes: str = "auto"
    held: Places = field(default_factory=dict[State, tuple[Sharding, ...]])
    objective: Literal["step", "throughput"] = "step"
    accumulate_dtype: AccumulateDtype = "f32"
    donate_states: bool = False
    costs_folder: str = ""
    force: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()

    def __post_init__(self) -> None:
        forced_schedule(self.choices, self.schedule)
        if self.inter == "none" and self.num_stages not in ("auto", 1):
            raise ValueError(
                f"inter=none plans one stage, and num_stages is {self.num_stages}; leave one of "
                "them out"
            )

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What is forced."""
        return tuple(map(parse_choice, self.force))

    def options(self) -> dict[str, str]:
        """The options of `alpa`, by their names with dashes."""
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
            number = {"num-stages": str(self.num_stages)}
            stages = {**number, **inter[self.inter], "mesh-shape": self.mesh_shape}
        if fixed := fixed_stages(self.choices):
            stages["fixed-stages"] = fixed
        return {
            "cluster": self.cluster,
            "num-micro-batches": str(self.num_micro_batches),
            "micro-batches": self.micro_batches,
            "num-layers": str(self.num_layers),
            "schedule": forced_schedule(self.choices, self.schedule),
            "intra": self.intra,
            "remat": self.remat,
            "objective": self.objective,
            "accumulate-dtype": self.accumulate_dtype,
            "donate-states": str(self.donate_states).lower(),
            "costs-folder": self.costs_folder,
            "meshes-over-hosts": str(self.capabilities.meshes_over_hosts).lower(),
            **stages,
        }


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned module, and the remarks of its passes."""

    module: ir.Module
    remarks: tuple[Diagnostic, ...]
    kept: Kept | None = None
    """what questions about the plan need (`runtime/questions`), if that was to be kept"""
    tried: Tried | None = None
    """what the search tried"""

    @property
    def plan(self) -> Plan:
        return Plan.read(main_function(self.module)) or Plan()

    def numbers(self, clock: Clock) -> PlanReport:
        """The plan in numbers, with the seconds of all phases until now and what was tried."""
        with clock.phase("report"):
            report = PlanReport.of(self.module)
        return report.searched(clock.seconds, self.tried)


def plan(
    module: ir.Module,
    settings: Settings,
    clock: Clock,
    *,
    faster_than: float | None = None,
    keep: bool = False,
) -> Planned:
    """Plans a copy of a program.

    Args:
        module: the program, at the size of one micro-batch.
        settings: what to plan for.
        clock: adds up the seconds of the passes.
        faster_than: the option `faster-than` of `alpa`.
        keep: whether to keep what questions about the plan need.

    Raises:
        PlanningError: a pass fails, no plan takes less than `faster_than` seconds, or none keeps to
            the capabilities of the executor.
    """
    copy = separate(module)
    if settings.held or settings.choices:
        with copy.context:
            _write_fixed(copy, settings)
    options = settings.options()
    if faster_than is not None:
        options["faster-than"] = repr(faster_than)
    try:
        step, kept, tried = _configured("alpa", options), Kept() if keep else None, list[Tried]()
        assert isinstance(step, Alpa)
        step = replace(step, kept=kept, on_tried=tried.append)
        remarks = run_steps([step], copy, clock)
        return Planned(module=copy, remarks=remarks, kept=kept, tried=tried[-1])
    except PlanningError as error:
        reason = settings.capabilities.reason
        if not reason or not isinstance(error.reason, MeshOverHostsError):
            raise
        note = Diagnostic("note", error.diagnostics[0].place, reason)
        raise PlanningError((*error.diagnostics, note), error.reason) from error


def _write_fixed(module: ir.Module, settings: Settings) -> None:
    """Writes the shardings that arguments have already or must have. Raises PlanningError."""
    try:
        function = check_input(module, is_checked=True)
        named = main_function(without_tuples(module))
    except PassError as error:
        problem = Diagnostic("error", place_of(error.location), error.message)
        raise PlanningError((problem,), error) from error
    if settings.held:
        write_held(function, settings.held)
    try:
        forced = forced_shardings(settings.choices, named)
    except ChoiceError as error:
        place = place_of(location_of(function))
        raise PlanningError((Diagnostic("error", place, str(error)),)) from error
    if forced:
        write_forced(function, forced)


def run_pass(
    name: str, options: Mapping[str, str], module: ir.Module, clock: Clock
) -> tuple[Diagnostic, ...]:
    """Runs one pass in place and returns its remarks.

    Raises:
        PlanningError: the pass fails, or does not have one of the options.
    """
    return run_steps([_configured(name, options)], module, clock)


def _configured(name: str, options: Mapping[str, str]) -> Pass:
    """A pass with its options. Raises PlanningError."""
    try:
        (step,) = pipeline.parsed(element_text(name, options))
    except passes.PipelineError as error:
        raise PlanningError((Diagnostic("error", Place(name), error.message),)) from error
    assert isinstance(step, Pass)
    return step


def run_steps(steps: Sequence[Pass], module: ir.Module, clock: Clock) -> tuple[Diagnostic, ...]:
    """Runs passes in place and returns their remarks.

    Raises:
        PlanningError: a pass fails.
    """
    said: list[Diagnostic] = []
    failed: list[PassError] = []

    def remark(location: ir.Location, message: str) -> None:
        said.append(Diagnostic("remark", place_of(location), message))

    with listening(module.context, said.append):
        try:
            pipeline.run_steps(
                module,
                steps,
                on_remark=remark,
                on_error=lambda error: failed.append(kept(error)),
                on_pass=clock.phase,
            )
        except ir.MLIRError as error:
            problems = tuple(one for one in said if one.severity in ("error", "note"))
            problems = problems or (Diagnostic("error", Place(steps[0].name), error.message),)
            raise PlanningError(problems, failed[0] if failed else None) from error
    return tuple(said)
