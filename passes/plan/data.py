"""A planned `@main` as plain data, and how its values vary over the micro-batches.

`read_planned` converts the IR into frozen dataclasses that outlive it. The export passes and the
runtime share them, and therefore these definitions:

- **varying**: values that each micro-batch has a version of: batch arguments, arguments that the
  forward part carries from one micro-batch to the next, what forward and backward fragments
  produce, and transfers of those.
- **gradients**: what a backward fragment produces and an update fragment consumes, directly or
  through transfers. They are added up over the micro-batches where they are produced, and
  transferred once per step.
- **losses**: values that a forward fragment produces, that a result returns as a mean or a sum, and
  that an update fragment consumes, directly or through transfers. They are added up like
  gradients. If the update reads a wide copy (`stages/accumulators.py`), the copy is the loss.
- **totals**: gradients, losses and their transfers. The update phase reads their sum. Of any other
  varying value it reads the last micro-batch's version: either the forward part carries the value
  from one micro-batch to the next, or all versions are equal.
- **micro_used**: values of which the version of each micro-batch is needed. This can include
  gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from alpa.dialects.attributes import Argument, BackwardHalf, Part, Result, State, is_exact
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import Plan
from alpa.dialects.sharding import Sharding

MODULE = "alpa.module"
ACCUMULATORS = "alpa.accumulators"
EXTRA_RESULTS = "alpa.extra_results"
DONATED = "alpa.donated"
READ_BY_UPDATE = "alpa.read_by_update"
TOTAL = "alpa.total"
"""On arguments of an update's function between two passes of `export-stages`: a sum over the
micro-batches, of a `gradient` or of a loss that is returned as a `mean` or a `sum`."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A global tensor on a mesh; no sharding means one copy per device.

    The parts of an unreduced value lie along an extra leading dimension (`sums.stored`).
    """

    mesh: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | None = None

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that each dimension is split over."""
        return self.sharding.axis_names if self.sharding else ((),) * len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, as `graph.element_bytes` says of its type."""
        digits = re.search(r"\d+", self.dtype)
        if digits is None:
            raise ValueError(f"elements of type {self.dtype} have no size")
        size = max(1, int(digits[0]) // 8)
        return 2 * size if self.dtype.startswith("complex") else size

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("f", "bf", "complex"))


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A mesh: its axes, major first, and the cluster's numbers of its hosts and devices."""

    name: str
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    device: str = ""
    """the name of its devices, if the cluster has hosts of several kinds"""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One `mpmd.fragment`; inputs and outputs are numbers of values.

    Its module takes the inputs, then one donated accumulator for each result number in
    `accumulators`; it returns the outputs, the accumulated ones as sums, then this micro-batch's
    version of each result number in `extra_results`. `donated` are numbers of operands. `wide` has
    for each output that is a copy of another one in a wider type both, the copy first.
    `read_by_update` are numbers of inputs that only a merged update reads.
    """

    name: str
    mesh: str
    part: Part
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    seconds: float = 0.0
    """predicted, of one run"""
    compute_seconds: float | None = None
    """of one run, split evenly over the devices, nothing sent; None before shardings are chosen"""
    remat: tuple[int, ...] = ()
    """the layers whose forward ops it computes again"""
    module: str | None = None
    accumulators: tuple[int, ...] = ()
    extra_results: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    wide: tuple[tuple[int, int], ...] = ()
    read_by_update: tuple[int, ...] = ()
    half: BackwardHalf | None = None
    """of a backward that `split-backward` has split"""
    stage: int | None = None
    """the number of its stage; an update has the number of its mesh"""

    @property
    def runs_forward(self) -> bool:
        """Whether it is a forward part, or a backward part merged with it (`merge-fragments`)."""
        return runs_forward(self.part, self.origins)


def runs_forward(part: Part, origins: tuple[Origin, ...]) -> bool:
    """As `Fragment.runs_forward`."""
    return part == "forward" or (
        part == "backward" and any(origin.part == "forward" for origin in origins)
    )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One `mpmd.transfer` between two values."""

    source: int
    target: int
    method: str | None = None
    seconds: float = 0.0
    """predicted, each time"""
    slow_bytes: int | None = None
    """over links between hosts; None before `insert-cross-mesh-reshard`"""
    fast_bytes: int | None = None
    """over links inside hosts; likewise"""
    overlap: float = 0.0
    """the share of its seconds in which the receiving mesh can compute"""


@dataclass(frozen=True, kw_only=True)
class ProgramArgument:
    """One argument of the planned @main. `number` is its number in the original program."""

    value: int
    number: int
    attributes: Argument


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """One result of the planned @main. `number` is its number in the original program."""

    value: int
    number: int
    attributes: Result

    @property
    def sum_kind(self) -> str | None:
        """`mean` or `sum` over the micro-batches, where it is one of the two."""
        role = self.attributes.role
        return role.kind if role is not None and role.kind in ("mean", "sum") else None


@dataclass(frozen=True, kw_only=True)
class Program:
    """A planned @main: numbered values, and fragments and transfers in program order."""

    values: tuple[Value, ...]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]
    steps: tuple[Fragment | Transfer, ...]
    meshes: tuple[DeviceMesh, ...]
    plan: Plan
    micro_batches: str | None = None
    """`alpa.micro_batches`: what is known of them"""

    def axis_size(self, value: int, axis: str) -> int:
        """The size of an axis of a value's mesh."""
        return self._axes[self.values[value].mesh][axis]

    def local_bytes(self, value: int) -> int:
        """The bytes that one device of its mesh holds of a value, padding included."""
        it = self.values[value]
        parts = [
            -(-size // prod(self.axis_size(value, axis) for axis in axes))
            for size, axes in zip(it.shape, it.dims, strict=True)
        ]
        return prod(parts) * it.itemsize

    def local_sum_bytes(self, value: int) -> int:
        """As `local_bytes`, of the sum of the value's versions that the executor makes."""
        it = self.values[value]
        wide = replace(it, dtype=self.plan.accumulator(it.dtype))
        return self.local_bytes(value) // it.itemsize * wide.itemsize

    @cached_property
    def _axes(self) -> dict[str, dict[str, int]]:
        return {mesh.name: dict(mesh.axes) for mesh in self.meshes}

    @property
    def is_exact(self) -> bool:
        """Whether its micro-batches are proven to give what the whole batch gives."""
        return is_exact(self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        return self.plan.num_micro_batches

    def read_by(self, *parts: Part) -> set[int]:
        """Values that fragments of these parts consume."""
        return {v for f in self.fragments if f.part in parts for v in f.inputs}

    def made_by(self, *parts: Part) -> set[int]:
        """Values that fragments of these parts produce."""
        return {v for f in self.fragments if f.part in parts for v in f.outputs}

    def runs(self, fragment: Fragment) -> int:
        """How often a step runs a fragment."""
        return 1 if fragment.part == "update" else self.num_micro_batches

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        return tuple(step for step in self.steps if isinstance(step, Fragment))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(step for step in self.steps if isinstance(step, Transfer))

    @cached_property
    def parts(self) -> tuple[Part | None, ...]:
        """The part that produces each value, through transfers; None for arguments."""
        made: dict[int, Part] = {v: f.part for f in self.fragments for v in f.outputs}
        return tuple(made.get(source) for source in self.sources)

    @cached_property
    def states(self) -> frozenset[int]:
        """The arguments that the step replaces."""
        return frozenset(a.value for a in self.arguments if a.attributes.role == "state")

    @cached_property
    def parameters(self) -> frozenset[int]:
        """States that a forward or backward part reads; the others are the optimizer's."""
        read = {
            value
            for fragment in self.fragments
            if fragment.part != "update"
            for number, value in enumerate(fragment.inputs)
            if number not in fragment.read_by_update
        }
        return self.states & self._with_sources(read)

    @cached_property
    def activations(self) -> frozenset[int]:
        """What forward parts made and backward parts read, where it is read."""
        return frozenset(v for v in self.read_by("backward") if self.parts[v] == "forward")

    @cached_property
    def new_states(self) -> dict[int, tuple[int, ...]]:
        """Argument value -> the values that are its state after the step, one for each copy.

        Results say so by their role; those without one, by the argument's `tf.aliasing_output`.
        """
        by_role: dict[State, list[int]] = {}
        by_number: dict[int | None, list[int]] = {}
        for result in self.results:
            role = result.attributes.role
            if role is None:
                by_number.setdefault(result.number, []).append(result.value)
            elif result.attributes.state is not None:
                by_role.setdefault(result.attributes.state, []).append(result.value)
        return {
            argument.value: (
                *by_role.get((argument.number, argument.attributes.slice), ()),
                *by_number.get(argument.attributes.aliasing_output, ()),
            )
            for argument in self.arguments
        }

    @cached_property
    def carries(self) -> dict[int, int]:
        """Argument value -> the value that is its version in the next micro-batch.

        Those are the states that the forward part writes. A copy on the same mesh is preferred.
        """
        carries: dict[int, int] = {}
        for old, states in self.new_states.items():
            new = [value for value in states if self.parts[value] == "forward"]
            here = [value for value in new if self.values[value].mesh == self.values[old].mesh]
            if new:
                carries[old] = (here or new)[0]
        return carries

    @cached_property
    def varying(self) -> frozenset[int]:
        """Values with a version per micro-batch."""
        batches = (a.value for a in self.arguments if a.attributes.role == "batch")
        return self._with_copies({*batches, *self.carries, *self.made_by("forward", "backward")})

    @cached_property
    def read_by_updates(self) -> frozenset[int]:
        """Values that an update fragment consumes, directly or through transfers."""
        return self._with_sources(self.read_by("update"))

    def _with_sources(self, values: Iterable[int]) -> frozenset[int]:
        """Values, and all that transfers make them of."""
        found = set(values)
        for step in reversed(self.transfers):
            if step.target in found:
                found.add(step.source)
        return frozenset(found)

    def _with_copies(self, values: Iterable[int]) -> frozenset[int]:
        """Values, and all that transfers make of them."""
        found = set(values)
        for step in self.transfers:
            if step.source in found:
                found.add(step.target)
        return frozenset(found)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """What backward fragments produce and updates consume."""
        return frozenset(self.made_by("backward") & self.read_by_updates)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Of each value the one that it is a copy of, through transfers; most are their own."""
        sources = list(range(len(self.values)))
        for step in self.transfers:
            sources[step.target] = sources[step.source]
        return tuple(sources)

    @cached_property
    def losses(self) -> dict[int, str]:
        """What forward fragments produce, updates consume, and results are a mean or a sum of:
        which of the two."""
        kinds = {
            self.sources[result.value]: result.sum_kind
            for result in self.results
            if result.sum_kind is not None
        }
        kinds.update((copy, kinds[v]) for f in self.fragments for copy, v in f.wide if v in kinds)
        return {
            value: kinds[value]
            for value in sorted(self.made_by("forward") & self.read_by_updates & kinds.keys())
            if self.values[value].is_float
        }

    @cached_property
    def totals(self) -> frozenset[int]:
        """Gradients, losses and the transfers of them that reach an update; empty for one
        micro-batch."""
        if self.num_micro_batches == 1:
            return frozenset()
        return self._with_copies({*self.gradients, *self.losses}) & self.read_by_updates

    @cached_property
    def returned_totals(self) -> dict[int, int]:
        """Results that are means or sums -> the total that each is taken from, if there is one:
        its own, or that of its wide copy, unless the copy is stored in parts."""
        copies = {
            value: copy
            for fragment in self.fragments
            for copy, value in fragment.wide
            if self.values[copy].shape == self.values[value].shape
        }
        found: dict[int, int] = {}
        for result in self.results:
            total = result.value if result.value in self.totals else copies.get(result.value)
            if result.sum_kind is not None and total in self.totals:
                found[result.value] = total
        return found

    @cached_property
    def micro_used(self) -> frozenset[int]:
        """Varying values whose versions of the single micro-batches are needed.

        A result that is a mean or a sum of a gradient is taken from the gradient's total.
        """
        returned = (
            result.value
            for result in self.results
            if result.sum_kind is None or result.value not in self.returned_totals
        )
        used = {*self.carries.values(), *returned, *self.read_by("forward", "backward")}
        return self._with_sources(used) & self.varying
