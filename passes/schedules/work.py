"""A pipeline schedule as data: for each mesh, the list of its work on the micro-batches.

An item of work is what one stage does for one micro-batch: its `forward`, its whole `backward`, or
the two parts of a backward: `backward-input` computes the gradients that the stage before waits
for, `backward-weight` those that only accumulators wait for. A mesh runs its list in order, one
item at a time. It may hold several stages (chunks of the model); stages are numbered in the order
of the layers, over all meshes.

Work depends on other work:

- a forward on the forward of the stage before,
- a backward, or a backward-input, on the forward of its own stage and on the backward or the
  backward-input of the stage behind,
- a backward-weight on the backward-input of its own stage,

each of the same micro-batch. Work is written as torch writes it: `2F5` is the forward of
micro-batch 5 on stage 2, `B` a backward, `I` a backward-input and `W` a backward-weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["forward", "backward", "backward-input", "backward-weight"]
LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward-input": "I",
    "backward-weight": "W",
}
"""How each kind of work is written."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage does for one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    @property
    def hands_back(self) -> bool:
        """Whether the stage before waits for it: a backward or a backward-input."""
        return self.kind in ("backward", "backward-input")

    @property
    def frees(self) -> bool:
        """Whether the stage needs nothing of the micro-batch after it."""
        return self.kind in ("backward", "backward-weight")

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class WorkLists:
    """The work of each mesh in its order; `verify` says whether it can be run."""

    lists: tuple[tuple[Work, ...], ...]

    @property
    def num_meshes(self) -> int:
        return len(self.lists)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((work.stage for work in self), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        return 1 + max((work.micro_batch for work in self), default=-1)

    @cached_property
    def mesh_of(self) -> dict[int, int]:
        """The mesh of each stage."""
        return {work.stage: mesh for mesh, them in enumerate(self.lists) for work in them}

    @property
    def has_backward(self) -> bool:
        """Whether it is a training step: a forward-only one has no backwards at all."""
        return bool(self._backwards)

    def __iter__(self) -> Iterator[Work]:
        return (work for them in self.lists for work in them)

    def needs(self, work: Work) -> tuple[Work, ...]:
        """The work that an item depends on, beside the items before it on its mesh."""
        stage, m = work.stage, work.micro_batch
        if work.kind == "forward":
            return (Work(stage - 1, "forward", m),) if stage else ()
        if work.kind == "backward-weight":
            return (Work(stage, "backward-input", m),)
        own = Work(stage, "forward", m)
        if stage + 1 == self.num_stages:
            return (own,)
        behind = self._backwards.get((stage + 1, m), Work(stage + 1, "backward", m))
        return (own, behind)

    def backward_of(self, stage: int, micro_batch: int) -> Work | None:
        """The backward or the backward-input of a stage and micro-batch, if the lists have one."""
        return self._backwards.get((stage, micro_batch))

    @property
    def splits_backward(self) -> bool:
        return any(work.kind == "backward-weight" for work in self)

    def received(self, work: Work) -> tuple[Work, ...]:
        """The work on other meshes whose results an item reads."""
        here = self.mesh_of[work.stage]
        return tuple(it for it in self.needs(work) if self.mesh_of[it.stage] != here)

    @cached_property
    def _backwards(self) -> dict[tuple[int, int], Work]:
        """By stage and micro-batch, what the stage before waits for."""
        return {(work.stage, work.micro_batch): work for work in self if work.hands_back}
