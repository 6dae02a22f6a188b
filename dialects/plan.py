"""The planner's attributes on a planned `@main` and its transfers, as dataclasses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from alpa.dialects.attributes import MESHES, PLAN, RESHARD, SOLVER
from alpa.dialects.bindings import func, ir
from alpa.dialects.records import Record, entry

Schedule = Literal[
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
]
_NAMED = get_args(Schedule)
_CHUNKS = re.compile(r"interleaved-1f1b:[1-9]\d*")
"""With the number of stages on each mesh, where it is not 2."""
_OWN = re.compile(r"\d+[FBIW]\d+([,;]\d+[FBIW]\d+)*")
"""A user's own schedule: the work of each mesh, separated by commas, and by semicolons between
meshes (`passes/schedules/planned.py`)."""
AccumulateDtype = Literal["f32", "f64", "same"]

_FLOAT = re.compile(r"b?f(\d+)")
"""A floating-point type and its bits: bf16, f32, f8E4M3FN."""


@dataclass(frozen=True, kw_only=True)
class MeshAssignment(Record):
    """One entry of `alpa.meshes`: the hosts and devices of a mesh and its logical shape.

    `devices` are numbers in the cluster, row-major over (host, device of the host).
    """

    NAME: ClassVar[str] = MESHES

    name: str
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    logical_shape: tuple[int, ...]
    device: str = entry("")
    """the name of its devices, if the cluster has hosts of several kinds"""


def read_meshes(function: func.FuncOp) -> list[MeshAssignment]:
    """`alpa.meshes`; empty where the function has none. Raises ValueError for other things."""
    return MeshAssignment.read_list(function)


@dataclass(frozen=True, kw_only=True)
class Dropped(Record):
    """What a search left out though it may have been possible, and why."""

    NAME: ClassVar[str] = f"dropped of {PLAN}"

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """`alpa.plan`: micro-batches per step, the schedule, predicted seconds and bytes per mesh.

    `estimated_step_seconds` is T of the stages by the costs that they were cut by (`stage_dp.py`);
    under schedules other than GPipe and 1F1B, the simulated step of these stages, without a bound.
    No cut that the options allow has a smaller T than `estimated_step_bound`, unless it uses a
    submesh that was not tried (`dropped`), or leaves hosts of a single kind idle where no such cut
    was planned. Each of its stages takes only its compute, split as far
    as each op can be (if less work reaches no larger share of a device's peak). Transfers between
    stages are estimates in both. If there was only one cut, the two are equal. The bound is 0 if
    the cut does not minimise T. `accumulate_dtype` is the narrowest type of a sum over the
    micro-batches (`accumulator`).
    """

    NAME: ClassVar[str] = PLAN

    num_micro_batches: int = 1
    schedule: str = "gpipe"
    """one of `Schedule`, `interleaved-1f1b:N`, or the lists of a user's own"""
    estimated_step_seconds: float = entry(0.0, always=True)
    estimated_step_bound: float = entry(0.0, always=True)
    predicted_step_seconds: float = 0.0
    predicted_peak_bytes: tuple[int, ...] = ()
    cluster: str = entry("", always=True)
    accumulate_dtype: AccumulateDtype = entry("f32")
    dropped: tuple[Dropped, ...] = entry(())
    runner_up: str = entry("")
    """the schedule of the second best plan, where several were searched"""
    runner_up_seconds: float = entry(0.0)
    """its predicted step"""
    runner_up_is_estimated: bool = entry(False)
    """whether that is the estimate of its stages, because their plan was not finished"""

    def __post_init__(self) -> None:
        is_own = _OWN.fullmatch(self.schedule) or _CHUNKS.fullmatch(self.schedule)
        if self.schedule not in _NAMED and not is_own:
            raise ValueError(
                f'schedule is "{self.schedule}"; expected one of {", ".join(_NAMED)}, or lists of '
                "work such as 0F0,0B0;1F0,1B0"
            )

    def accumulator(self, dtype: str) -> str:
        """The element type that adds up values of an element type over the micro-batches.

        Floating-point types narrower than `accumulate_dtype` become that type, complex types by
        their parts. Other types stay; with `same` every type stays.
        """
        if self.accumulate_dtype == "same":
            return dtype
        if dtype.startswith("complex<"):
            part = dtype.removeprefix("complex<").removesuffix(">")
            return f"complex<{self.accumulator(part)}>"
        bits = _FLOAT.match(dtype)
        is_narrow = bits is not None and int(bits[1]) < int(self.accumulate_dtype[1:])
        return self.accumulate_dtype if is_narrow else dtype

    def accumulator_type(self, type_: ir.RankedTensorType) -> ir.RankedTensorType:
        """The type of a tensor's sum over the micro-batches, by `accumulator`."""
        element = ir.Type.parse(self.accumulator(str(type_.element_type)), type_.context)
        return ir.RankedTensorType.get(type_.shape, element)


@dataclass(frozen=True, kw_only=True)
class SolverReport(Record):
    """One entry of `alpa.solver`: what is proven about the shardings of a mesh.

    Seconds and bytes are per step and device. `status` is `optimal` (the objective equals the bound
    to 1e-6 of it), `within_gap` or `time_limit`. `status`, `bound` and `gap` refer to `problem`. If
    that is `folded`, equal layers have the same shardings, and an assignment in which they differ
    may cost less than `bound`.
    """

    NAME: ClassVar[str] = SOLVER

    mesh: str
    intra: str
    status: str
    objective: float
    bound: float
    variables: int
    peak_bytes: int
    problem: str = entry("whole", always=True)
    """that was solved: `whole` or `folded`"""
    folded_objective: float | None = entry(None)
    """of the folded problem, where there are equal layers"""
    folded_bound: float | None = entry(None)
    """likewise"""

    @property
    def gap(self) -> float:
        return (self.objective - self.bound) / self.objective if self.objective else 0.0


def read_solver_reports(function: func.FuncOp) -> list[SolverReport]:
    """Reads `alpa.solver` of @main, a report per mesh; empty before shardings are found.

    Raises:
        ValueError: the attribute is invalid.
    """
    return SolverReport.read_list(function)


def write_solver_reports(function: func.FuncOp, reports: Sequence[SolverReport]) -> None:
    function.attributes[SOLVER] = ir.ArrayAttr.get([report.to_attr() for report in reports])


@dataclass(frozen=True, kw_only=True)
class Reshard(Record):
    """`alpa.reshard` of a transfer: how it is done, bytes over links between and inside hosts, and
    the share of its seconds in which the receiving mesh can compute."""

    NAME: ClassVar[str] = RESHARD

    method: str
    slow_bytes: int
    fast_bytes: int
    overlap: float = entry(0.0)
