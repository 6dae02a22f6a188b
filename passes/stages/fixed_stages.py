"""The option `fixed-stages`: stages that a plan must have, whatever else is searched.

    0-7:1x8,8-11:1x4:2x2

Layers 0 to 7 are a stage on a submesh of one host and eight devices in any logical shape; layers 8
to 11 one on four devices, seen as 2x2. Layers that are not listed are searched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from alpa.passes.base import OptionError
from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.solve.stages import placement
from alpa.passes.solve.stages.problem import Problem
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.given_meshes import SHAPE

_STAGE = re.compile(rf"(\d+)(?:-(\d+))?:([1-9]\d*)x([1-9]\d*)(?::({SHAPE}))?")


@dataclass(frozen=True, kw_only=True)
class FixedStage:
    """Layers `first` to `last` (inclusive) on `submesh`: hosts, and devices of each."""

    first: int
    last: int
    submesh: tuple[int, int]
    shape: tuple[int, ...] | None = None
    """the logical shape of the mesh; None: any"""

    @classmethod
    def parse(cls, text: str) -> FixedStage:
        """Parses one stage of the option.

        Raises:
            OptionError: it is none.
        """
        match = _STAGE.fullmatch(text.strip())
        if match is None:
            raise OptionError(
                f"option 'fixed-stages' holds '{text}'; expected the first and last layer of each "
                "stage, its hosts and devices per host, and, if wanted, its logical shape, such as "
                "0-7:1x8,8-11:1x4:2x2"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        submesh = int(match[3]), int(match[4])
        shape = None if match[5] is None else tuple(map(int, match[5].split("x")))
        if last < first:
            raise OptionError(
                f"option 'fixed-stages' holds '{text}', whose last layer comes before the first"
            )
        if shape is not None and prod(shape) != prod(submesh):
            raise OptionError(
                f"option 'fixed-stages' holds '{text}'; that is a shape of {prod(shape)} for "
                f"{prod(submesh)} device(s)"
            )
        return cls(first=first, last=last, submesh=submesh, shape=shape)

    def __str__(self) -> str:
        hosts, devices = self.submesh
        seen = "" if self.shape is None else f":{'x'.join(map(str, self.shape))}"
        return f"{self.first}-{self.last}:{hosts}x{devices}{seen}"

    def admits(self, submesh: Submesh) -> bool:
        """Whether the stage may be on a submesh in a logical shape."""
        *size, shape = submesh
        return self.submesh == tuple(size) and self.shape in (None, shape)


def parse_stages(text: str) -> tuple[FixedStage, ...]:
    """The stages of the option, in the order of their layers; none for an empty text.

    Raises:
        OptionError: one of them is none, or a layer is in two.
    """
    stages = sorted(map(FixedStage.parse, text.split(",") if text else ()), key=lambda s: s.first)
    for before, after in pairwise(stages):
        if after.first <= before.last:
            raise OptionError(f"option 'fixed-stages' gives layer {after.first} to two stages")
    return tuple(stages)


def check_fixed(stages: Sequence[FixedStage], num_layers: int, cluster: AnyCluster) -> None:
    """Checks the stages against a program and a cluster.

    Raises:
        OptionError: there are fewer layers, or the cluster has no such submesh.
    """
    for stage in stages:
        if stage.last >= num_layers:
            raise OptionError(
                f"option 'fixed-stages' holds '{stage}'; the program is cut into {num_layers} "
                "layer(s), counted from 0; num-layers sets their number"
            )
        every = {
            submesh
            for kind in cluster.kinds
            for submesh in placement.submeshes(kind.hosts, kind.devices_per_host)
        }
        if stage.submesh not in every:
            known = ", ".join(f"{n}x{m}" for n, m in sorted(every))
            raise OptionError(
                f"option 'fixed-stages' holds '{stage}'; the cluster's submeshes are {known}"
            )


def with_shapes(
    submeshes: Sequence[tuple[int, Submesh]], stages: Sequence[FixedStage]
) -> list[tuple[int, Submesh]]:
    """The submeshes of a search, each with its kind of hosts, and those in fixed shapes."""
    fixed = {(*stage.submesh, stage.shape) for stage in stages if stage.shape is not None}
    more = [(kind, (*submesh[:2], shape)) for kind, submesh in submeshes for *_, shape in fixed]
    known = dict.fromkeys([*submeshes, *(it for it in more if it[1] in fixed)])
    return list(known)


def restricted(
    problem: Problem, stages: Sequence[FixedStage], submeshes: Sequence[Submesh]
) -> Problem:
    """The problem with infinite times for all that overlaps a fixed stage without being it.

    Args:
        problem: of all stages.
        stages: those that are fixed.
        submeshes: of the problem, with their logical shapes.
    """
    if not stages:
        return problem
    layers = np.arange(problem.num_layers)
    first, last = layers[:, None, None], layers[None, :, None]
    t = problem.t
    for stage in stages:
        admitted = np.array([stage.admits(submesh) for submesh in submeshes])
        is_stage = (first == stage.first) & (last == stage.last) & admitted
        overlaps = (first <= stage.last) & (last >= stage.first)
        t = np.where(overlaps & ~is_stage, np.inf, t)
    return replace(problem, t=t)
