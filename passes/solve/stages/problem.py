"""The problem of cutting layers into pipeline stages on submeshes, its solution, and their check.

With ``a_i = t_i + c_i`` (seconds of one micro-batch's forward and backward, and of the transfers
into the stage from both its neighbours, which depend on whether these are on its host), ``b_i``
(the same without the share of transfers in which the stage can compute, or that share if it is
longer) and ``u_i`` (seconds of the update), the seconds of a step are

    T = sum_i a_i + (B - 1) max_i b_i + max_i u_i                       (paper, eq. 2, extended)

under GPipe and 1F1B. Under other schedules pipelines fill and drain faster, and with v stages per
mesh, the mesh of the slowest stage takes v times what that does, if its stages are alike:

    T = e sum_i a_i + v ((B - e) max_i b_i + max_i u_i)

where e is the schedule's bubble for equal stages, as a share of that of 1F1B (`fill_share`). This T
chooses the cut. The step that the search then compares is that of the simulated schedule.

A stage that has s stages from itself to the last keeps min(B, s) micro-batches in flight under
1F1B, B under GPipe, min(B, 2s - 1) under eager 1F1B, and min(B, S) of S stages under ZB-H1;
``max_in_flight`` says whether memory admits that (eq. 5).

**How T relates to the simulated step** of GPipe and 1F1B (`passes.schedules`), where nothing hides
transfers, so that b_i = a_i. Let p_i be the seconds of stage i's
forward with the transfer into it, q_i those of its backward with the transfer into it, so that
a_i = p_i + q_i. An update waits only for the last backward of its own stage. With

    T+ = sum_i a_i + (B - 1) (max_i p_i + max_i q_i) + max_i u_i

T <= T+, and T = T+ if one stage has both the longest forward and the longest backward. The
*pipeline part* of T or T+ is the expression without max u.

- Neither GPipe nor 1F1B takes longer than T+; where T = T+, neither takes longer than T.
- The pipeline part of GPipe equals that of T+: its forwards and its backwards are two flow shops of
  B equal jobs. T is therefore not an upper bound for GPipe. T assumes that forwards fill the gaps
  between backwards.
- The pipeline part of 1F1B lies between sum_i a_i + (B - 1) a_last and that of T+: every cycle of
  waiting stages has as many forwards as backwards on each, so its steady state takes max_i a_i per
  micro-batch; only the warm-up and the drain pair the forward of one stage with the backward of
  another. It is less than T where the slowest stage hides the work of those behind it.
- Both schedules take T if all stages are equal, or if the last stage has the longest forward and
  the longest backward. A forward-only pipeline takes T.
- The updates of all stages but the first begin while others still run backwards. max u is
  therefore an upper bound, and exact where the first stage's update is the longest.

If a value skips stages, only the stage that reads it receives it. T counts its transfer at each
stage in between, too.

The stages use every device, in any order of submeshes. Of several groups of hosts, each of another
kind than its neighbours, stages on a group follow one another, and whole hosts may stay idle; whole
groups only before all that are used.

Where one stage after the other would lie on parts of two hosts, `placement` moves the stages of its
block. Which of them share a host then depends on all of them, so each of their transfers counts as
the slowest kind.

Three restrictions can be added:

* ``equal_layers``, the paper's baseline "equal layer" (section 8.1, figure 9): each of S stages
  gets floor(K / S) or ceil(K / S) of the K layers, and a submesh of D / S of the D devices.
* ``equal_meshes``: all stages have the same submesh in the same logical shape, on one kind of
  hosts. Whole hosts may stay idle.
* ``given``, meshes that exist already and hold state. Mesh q of Q takes layers i..j or none, in
  the order of the meshes, and only cuts that move the fewest bytes of that state are allowed. A
  mesh without layers counts as if it were a stage: Q is the number of stages of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import Literal

import numpy as np

from alpa.passes.schedules.planned import chunks_of, fill_share, in_flight
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.least_sums import least_before
from alpa.passes.solve.stages.placement import Group, blocks

Objective = Literal["step", "throughput"]
NEAR, FAR, OTHER = range(3)
"""Where the stage before or behind is: on the same host, on another one, on another group."""


class NoCutError(ValueError):
    """No cut satisfies the constraints; the message says which of them binds."""


class NoCutInMemoryError(NoCutError):
    """There are cuts, but none of them fits into memory."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers ``first`` to ``last`` (inclusive) on ``problem.submeshes[submesh]``."""

    first: int
    last: int
    submesh: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """Q meshes that exist already, in the order of the stages."""

    mesh_of: tuple[int, ...]
    """the mesh that each submesh of the problem is; a mesh may be several, used in several ways"""
    far: tuple[tuple[bool, bool], ...]
    """of each mesh: whether the meshes before and behind it are on other hosts"""
    moved: np.ndarray
    """bytes that layers i..j on mesh q read and that are held elsewhere, [K, K, Q]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Times in seconds; index ``[i, j, m]`` is layers i..j (inclusive, i <= j) on submesh m."""

    groups: tuple[Group, ...]
    """the hosts in the order of the stages"""
    submeshes: tuple[tuple[int, int], ...]
    """hosts and devices per host"""
    t: np.ndarray
    """forward and backward of one micro-batch, inf = impossible, [K, K, M]"""
    u: np.ndarray
    """update, once per step, [K, K, M]"""
    max_in_flight: np.ndarray
    """micro-batches in flight that memory admits, 0 = does not fit at all, [K, K, M]"""
    c: np.ndarray
    """transfers from the stage before into one that begins with layer i on submesh m, [K, M, 2]:
    where that is on the same host, and on another one; of several groups, [K, M, 3]: and on
    one of another group; c[0] = 0"""
    back: np.ndarray
    """transfers of backwards from the stage behind into one that ends with layer j on submesh m,
    likewise; back[K - 1] = 0"""
    num_micro_batches: int
    schedule: str
    """of a plan (`schedules/planned.py`)"""
    hidden: np.ndarray | None = None
    """the share of a transfer into submesh m in which that can compute, [M, 2] or [M, 3] as the
    last dimensions of `c`; None: nothing"""
    num_stages: int | None = None
    """as many stages exactly; None = any number"""
    minimise: Objective = "step"
    """T, or the longest b"""
    equal_layers: bool = False
    equal_meshes: tuple[int, ...] | None = None
    """the number of the mesh that each submesh is, size and shape: all stages take the same one"""
    given: Given | None = None
    kind_of: tuple[int, ...] | None = None
    """the kind of hosts of each submesh; None: there is one kind"""

    @property
    def num_layers(self) -> int:
        return self.c.shape[0]

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of hosts of each submesh."""
        return (0,) * len(self.submeshes) if self.kind_of is None else self.kind_of

    @cached_property
    def sizes(self) -> list[int]:
        """The devices of each submesh."""
        return [hosts * devices for hosts, devices in self.submeshes]

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        layers, submeshes, given = self.num_layers, len(self.submeshes), self.given
        each, ends = (
            (layers, layers, submeshes),
            (layers, submeshes, 3 if len(self.groups) > 1 else 2),
        )
        arrays: dict[str, tuple[np.ndarray, tuple[int, ...]]] = {
            name: (getattr(self, name), each) for name in ("t", "u", "max_in_flight")
        }
        arrays |= {name: (getattr(self, name), ends) for name in ("c", "back")}
        if given is not None:
            arrays["moved"] = given.moved, (layers, layers, len(given.far))
        if self.hidden is not None:
            arrays["hidden"] = self.hidden, ends[1:]
            if (self.hidden > 1).any():
                raise ValueError("hidden must be at most 1")
        for name, (array, shape) in arrays.items():
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
            used = array[np.triu_indices(layers)] if shape == each else array
            if not (used >= 0).all():
                raise ValueError(f"{name} must not be negative or NaN")
        if self.c[0].any() or self.back[-1].any():
            raise ValueError("c must be 0 for the first layer, and back for the last")
        if self.num_micro_batches < 1:
            raise ValueError(f"{self.num_micro_batches} micro-batches: at least 1 is needed")
        if any(a.kind == b.kind for a, b in pairwise(self.groups)):
            raise ValueError("neighbouring groups must be of different kinds")
        if self.equal_meshes is not None:
            if self.equal_layers or given is not None or len(self.groups) > 1:
                raise ValueError(
                    "equal_meshes are a restriction of their own, on one kind of hosts"
                )
            if len({*zip(self.equal_meshes, self.sizes, strict=True)}) > len({*self.equal_meshes}):
                raise ValueError("submeshes that are the same mesh differ in size")
        if given is None:
            return
        if self.num_stages is not None or self.equal_layers:
            raise ValueError("given meshes leave neither num_stages nor equal_layers open")
        meshes = len(given.far)
        if len(given.mesh_of) != submeshes or not {*given.mesh_of} <= {*range(meshes)}:
            raise ValueError(
                f"mesh_of must give each of {submeshes} submeshes one of the {meshes} meshes, not "
                f"{given.mesh_of}"
            )

    @property
    def counted_stages(self) -> int | None:
        """How many stages the schedule counts, where that is known: a given mesh without layers
        counts, too."""
        return self.num_stages if self.given is None else len(self.given.far)

    def in_flight(self, stages_to_last: int, stages: int | None = None) -> int:
        """Micro-batches that a stage keeps, by the number of stages from it to the last one, and of
        all stages where that is known."""
        stages = stages or self.counted_stages
        return in_flight(self.schedule, self.num_micro_batches, stages_to_last, stages)

    def objective(self, stages: tuple[Stage, ...]) -> float:
        """What is minimised, of a cut, in seconds."""
        return self.step_seconds(stages) if self.minimise == "step" else max(self.b(stages))

    def ways(self, group: Group, offset: int, submesh: int) -> tuple[int, int] | None:
        """How near the stages before and behind are, as the last indices of `c` and `back`.

        None for a stage that would lie on parts of two hosts, so that its block is moved.

        Args:
            offset: the devices of the group's stages before.
        """
        hosts, devices = self.submeshes[submesh]
        start = offset % group.devices_per_host
        if start + devices > group.devices_per_host:
            return None
        end = (start + hosts * devices) % group.devices_per_host
        return (FAR if start == 0 else NEAR), (FAR if end == 0 else NEAR)

    def a(self, stages: tuple[Stage, ...]) -> list[float]:
        """t + c of each stage, in seconds."""
        return self._seconds(stages, self.t, self.c, self.back)

    def b(self, stages: tuple[Stage, ...]) -> list[float]:
        """What each stage takes of every micro-batch, while transfers are hidden."""
        if self.hidden is None:
            return self.a(stages)
        seen = self._seconds(stages, self.t, *self.shares(1 - self.hidden))
        return [*map(max, seen, self.beside(stages))]

    def beside(self, stages: tuple[Stage, ...]) -> list[float]:
        """The transfers into each stage that run beside its work."""
        if self.hidden is None:
            return [0.0] * len(stages)
        return self._seconds(stages, np.zeros_like(self.t), *self.shares(self.hidden))

    def shares(self, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of `c` and `back`, by submesh and where the other stage is."""
        return self.c * share, self.back * share

    def _seconds(
        self, stages: tuple[Stage, ...], t: np.ndarray, c: np.ndarray, back: np.ndarray
    ) -> list[float]:
        """t and transfers of each stage, in seconds."""
        found: list[float] = []
        for s, ends in zip(stages, self._all_ways(stages), strict=True):
            before, behind = c[s.first, s.submesh], back[s.last, s.submesh]
            both = (
                before.max() + behind.max() if ends is None else before[ends[0]] + behind[ends[1]]
            )
            found.append(float(t[s.first, s.last, s.submesh] + both))
        return found

    def runs(self, stages: Sequence[Stage]) -> list[tuple[Group, list[Stage]]]:
        """The stages that follow one another on one group, with that group.

        It may be any group of the kind: only hosts and devices of one host matter.
        """
        by_kind = {group.kind: group for group in self.groups}
        runs = groupby(stages, key=lambda s: self.kinds[s.submesh])
        return [(by_kind[kind], [*run]) for kind, run in runs]

    def _all_ways(self, stages: tuple[Stage, ...]) -> list[tuple[int, int] | None]:
        """`ways` of each stage of a cut."""
        if self.given is not None:
            far = [self.given.far[self.given.mesh_of[s.submesh]] for s in stages]
            return [(int(before), int(behind)) for before, behind in far]
        found: list[tuple[int, int] | None] = []
        for group, run in self.runs(stages):
            sizes = [self.sizes[s.submesh] for s in run]
            offsets = accumulate(sizes, initial=0)
            mine = [self.ways(group, d, s.submesh) for d, s in zip(offsets, run, strict=False)]
            for block in blocks(group.devices_per_host, sizes):
                if any(mine[k] is None for k in block):
                    mine[block.start : block.stop] = [None] * len(block)
            if mine[0] is not None and found:
                mine[0] = OTHER, mine[0][1]
            if mine[-1] is not None and len(found) + len(mine) < len(stages):
                mine[-1] = mine[-1][0], OTHER
            found += mine
        return found

    def maxima(self, stages: tuple[Stage, ...]) -> tuple[float, float, float]:
        """(largest b, largest u, sum of a) of a cut."""
        u = max(float(self.u[s.first, s.last, s.submesh]) for s in stages)
        return max(self.b(stages)), u, sum(self.a(stages))

    def weights(self, stages: int | None = None) -> tuple[float, float, float]:
        """What counts how often in T for so many stages: max b, max u and the sum of a. None: in T
        of every cut, which weighs alike for all numbers of stages if these are open
        (`needs_number`)."""
        stages = stages or self.counted_stages or 1
        fill = fill_share(self.schedule, stages, self.num_micro_batches)
        chunks = chunks_of(self.schedule)
        return chunks * (self.num_micro_batches - fill), chunks, fill

    def step_seconds(self, stages: tuple[Stage, ...]) -> float:
        """T of a cut, in seconds."""
        weights = self.weights(self.counted_stages or len(stages))
        parts = zip(weights, self.maxima(stages), strict=True)
        return sum(weight * part for weight, part in parts)

    @cached_property
    def even_seconds(self) -> float:
        """What a step of so many stages takes at least, in seconds, however the stages share
        meshes: the least sum of t, split evenly over all meshes.

        T takes it that all stages of a mesh are as slow as the slowest one, and may be half as long
        again where few layers make unequal stages.
        """
        assert self.num_stages is not None, "schedules of several stages per mesh fix the number"
        least = least_before(self.t.min(axis=2))[-1]
        meshes = self.num_stages // chunks_of(self.schedule)
        return self.num_micro_batches * float(least) / meshes

    def moved(self, stages: tuple[Stage, ...]) -> float:
        """Bytes of held state that a cut moves."""
        if self.given is None:
            return 0.0
        given = self.given
        return float(sum(given.moved[s.first, s.last, given.mesh_of[s.submesh]] for s in stages))


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cut; ``evaluations`` counts the DPs that were run."""

    stages: tuple[Stage, ...]
    objective: float
    """what is minimised, in seconds"""
    moved: float = 0.0
    """bytes of held state"""
    evaluations: int
    others: tuple[tuple[Stage, ...], ...] = ()
    """cuts that were found on the way, each the best under some bounds of b and u"""


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes the objective and the bytes moved; checks layers, meshes and memory.

    Raises ``VerificationError``.
    """
    stages = solution.stages
    bounds = [(s.first, s.last) for s in stages]
    firsts = [0, *(last + 1 for _, last in bounds)]
    if firsts[:-1] != [first for first, _ in bounds] or firsts[-1] != problem.num_layers:
        raise VerificationError(f"stages {bounds} are no cut of {problem.num_layers} layers")
    count = len(stages) if problem.given is None else len(problem.given.far)
    if problem.given is None:
        _verify_hosts(problem, stages)
        to_last = range(count, 0, -1)
    else:
        meshes = [problem.given.mesh_of[s.submesh] for s in stages]
        if any(a >= b for a, b in pairwise(meshes)):
            raise VerificationError(f"meshes {meshes} are not in their order")
        to_last = [len(problem.given.far) - mesh for mesh in meshes]
    if problem.num_stages not in (None, len(stages)):
        raise VerificationError(f"{len(stages)} stages, {problem.num_stages} were asked for")
    for number, (stage, distance) in enumerate(zip(stages, to_last, strict=True)):
        needed = problem.in_flight(distance, count)
        fits = problem.max_in_flight[stage.first, stage.last, stage.submesh]
        if fits < needed:
            raise VerificationError(
                f"stage {number} keeps {needed} micro-batches, memory admits {fits}"
            )
    objective = problem.objective(stages)
    if not objective < inf or abs(objective - solution.objective) > 1e-9 * abs(objective):
        raise VerificationError(f"the stages take {objective} s, not {solution.objective} s")
    if problem.moved(stages) != solution.moved:
        raise VerificationError(
            f"the stages move {problem.moved(stages)} bytes, not {solution.moved}"
        )


def _verify_hosts(problem: Problem, stages: tuple[Stage, ...]) -> None:
    """Checks that the stages use whole hosts, and all of them if they are of one kind and may be
    of any size."""
    meshes = problem.equal_meshes
    may_be_idle = len(problem.groups) > 1 or meshes is not None
    if meshes is not None and len({meshes[s.submesh] for s in stages}) > 1:
        raise VerificationError("the stages are not on equal meshes")
    used: dict[int, int] = {}
    for group, run in problem.runs(stages):
        devices = sum(problem.sizes[s.submesh] for s in run)
        if devices % group.devices_per_host and may_be_idle:
            raise VerificationError(
                f"stages in a row use {devices} devices of kind {group.kind}, a part of a host"
            )
        used[group.kind] = used.get(group.kind, 0) + devices
    for kind, devices in used.items():
        there = sum(group.num_devices for group in problem.groups if group.kind == kind)
        if devices > there or (devices < there and not may_be_idle):
            raise VerificationError(f"stages use {devices} devices, not all {there} of the cluster")
