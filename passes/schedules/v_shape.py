"""Schedules of two chunks per mesh in V shape: ZB-V, V-Half and V-Min.

Mesh d of S holds the stages d and 2S - 1 - d, so the last mesh turns the forward around, and the
first one computes the loss. The lists follow from a **building block** (Qi et al., 2024, "Pipeline
parallelism with controllable memory"): the times of one micro-batch's six items on each mesh. A
micro-batch starts every six items. With the slopes (p, q) of a block,

    time of F on stage d        p d
    time of F on stage 2S-1-d   q (S-1-d) after the turn
    time of I on stage 2S-1-d   p d       after the loss
    time of I on stage d        q (S-1-d) after the turn

a micro-batch's activations are held for about 2 (p + q) (S - 1) items on each mesh, together for
both stages. So a mesh holds about (p + q) S / 6 micro-batches: S / 3 under V-Min, with (1, 1), S /
2 under V-Half, with (2, 1), and S under ZB-V, with (4, 2). Small delays at the turns keep items of
different micro-batches apart.

The block gives the order of forwards and backward-inputs. Weight gradients fill the gaps: a mesh
computes them when its next forward or backward-input is not ready, or would exceed the memory. The
seconds and the memory are those of the simulator, with equal items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from alpa.passes.schedules.measure import Costs, measure, peak
from alpa.passes.schedules.work import Kind, Work, WorkLists

_SLOPES = ((4, 2), (2, 1), (1, 1))
_ITEMS = 6
"""of a micro-batch on a mesh: forward, backward-input and backward-weight of two stages"""


def zb_v(meshes: int, batches: int) -> WorkLists:
    """ZB-V: as much memory as 1F1B, and no bubble but in the first and last S - 1 items."""
    return _shortest(meshes, batches, 2 * meshes)


def v_half(meshes: int, batches: int) -> WorkLists:
    """V-Half: (S + 2) // 2 micro-batches in memory."""
    return _shortest(meshes, batches, 2 * ((meshes + 2) // 2))


def v_min(meshes: int, batches: int) -> WorkLists:
    """V-Min: (S + 4) // 3 micro-batches in memory."""
    return _shortest(meshes, batches, 2 * ((meshes + 4) // 3))


def _shortest(meshes: int, batches: int, most: int) -> WorkLists:
    """The shortest schedule of the blocks whose order fits into memory, in activations of stages.

    With few meshes or micro-batches a block of more memory may fit, too.
    """
    ones, nothing = (1.0,) * 2 * meshes, (0.0,) * 2 * meshes
    found: list[WorkLists] = []
    for slopes in _SLOPES:
        ordered = WorkLists(lists=_ordered(meshes, batches, _block(meshes, slopes)))
        # Where each weight gradient follows its backward-input, the order itself needs this much.
        least = max(peak(works, held=ones, kept=nothing) for works in ordered.lists)
        if least <= most:
            found.append(_filled(ordered, most))
    costs = Costs.uniform(2 * meshes)
    return min(found, key=lambda schedule: measure(schedule, costs).seconds)


def _block(meshes: int, slopes: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Of each mesh, when it runs the two forwards and the two backward-inputs of a micro-batch.

    The delays are the smallest for which no two items of a mesh meet, of any micro-batches.
    """
    down, up = slopes
    last = meshes - 1

    def times(delays: tuple[int, int, int], d: int) -> tuple[int, int, int, int]:
        first = down * d
        second = down * last + 1 + delays[0] + up * (last - d)
        third = down * last + up * last + 2 + delays[0] + delays[1] + down * d
        fourth = (2 * down + up) * last + 3 + sum(delays) + up * (last - d)
        return first, second, third, fourth

    each = range(_ITEMS)
    for delays in sorted(product(each, each, each), key=sum):
        block = [times(delays, d) for d in range(meshes)]
        if all(len({time % _ITEMS for time in mine}) == len(mine) for mine in block):
            return block
    raise AssertionError(f"no delays keep the items of {meshes} meshes apart")


@dataclass
class _Mesh:
    """What a mesh has done, and what is left, while weight gradients are placed."""

    order: deque[Work]
    """its forwards and backward-inputs"""
    most: int
    """what it may hold"""
    works: list[Work] = field(default_factory=list[Work])
    weights: deque[Work] = field(default_factory=deque[Work])
    held: int = 0

    def choose(self, is_ready: bool) -> Work | None:
        """The next item: of the order, else a weight gradient, else nothing."""
        if is_ready and (self.order[0].kind != "forward" or self.held < self.most):
            return self.order.popleft()
        return self.weights.popleft() if self.weights else None

    def run(self, work: Work) -> None:
        self.works.append(work)
        if work.kind == "forward":
            self.held += 1
        elif work.kind == "backward-input":
            self.weights.append(Work(work.stage, "backward-weight", work.micro_batch))
        else:
            self.held -= 1


def _filled(ordered: WorkLists, most: int) -> WorkLists:
    """Runs an order item by item, and places the weight gradients."""
    states = [_Mesh(deque(works), most) for works in ordered.lists]
    done: set[Work] = set()
    left = 3 * sum(map(len, ordered.lists)) // 2
    while left:
        chosen: list[Work] = []
        for state in states:
            is_ready = bool(state.order) and done.issuperset(ordered.needs(state.order[0]))
            work = state.choose(is_ready)
            if work is not None:
                state.run(work)
                chosen.append(work)
        assert chosen, "a block's order can always go on"
        done.update(chosen)
        left -= len(chosen)
    return WorkLists(lists=tuple(tuple(state.works) for state in states))


def _ordered(
    meshes: int, batches: int, block: Sequence[tuple[int, int, int, int]]
) -> tuple[tuple[Work, ...], ...]:
    """The forwards and backward-inputs of each mesh, by their times in repeated blocks."""
    lists: list[tuple[Work, ...]] = []
    for d, times in enumerate(block):
        stages = d, 2 * meshes - 1 - d
        kinds: tuple[tuple[int, Kind], ...] = (
            (stages[0], "forward"),
            (stages[1], "forward"),
            (stages[1], "backward-input"),
            (stages[0], "backward-input"),
        )
        works = [
            (time + _ITEMS * m, Work(stage, kind, m))
            for m in range(batches)
            for time, (stage, kind) in zip(times, kinds, strict=True)
        ]
        lists.append(tuple(work for _, work in sorted(works, key=lambda it: it[0])))
    return tuple(lists)
