"""What stages take for token slices, by the cost model, and the slices that take the least time.

The time of a slice is linear in its context, and nearly linear in its length between samples that
double: short slices take as long as reading the weights does. The sequence is cut twice on a copy
of the program, into slices that grow (8, 8, 16, 32, ...) and into the same that shrink. So each
length is there with little context and with much. Nothing is counted for what stages send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import cast

import numpy as np

from alpa.dialects import ir, main_function
from alpa.dialects.mpmd_types import mesh_of
from alpa.passes.analysis.tokens.causal import causal
from alpa.passes.plan.fragment_costs import FragmentCosts
from alpa.passes.solve.tokens.slice_dp import BatchSlice, Problem, latency, solve
from alpa.passes.tokens.cuts import Span
from alpa.passes.tokens.stages import SlicedStages


def spans(lengths: Sequence[int]) -> list[Span]:
    """The slices of a sequence."""
    ends = pairwise(accumulate(lengths, initial=0))
    return [Span(number=n, begin=begin, end=end) for n, (begin, end) in enumerate(ends)]


def best_slices(
    module: ir.Module, length: int, granularity: int, num_micro_batches: int
) -> tuple[list[int], float, float]:
    """The slices of least latency, in tokens, with their latency and that of whole sequences.

    Latencies are seconds of forward and backward. All micro-batches are cut in the same way.

    Args:
        module: of stages, as `stage-mesh-partition` leaves it; it is not changed.
        length: tokens of a sequence, a multiple of `granularity`.
        granularity: of which each slice has a multiple, in tokens.
        num_micro_batches: the batch slices, of equally many samples.
    """
    units = length // granularity
    growing = [granularity * it for it in _doubling(units)]
    samples: dict[int, list[tuple[int, float]]] = defaultdict(list)
    num_stages = 1
    for lengths in (growing, growing[::-1], [length]):
        parts = spans(lengths)
        seconds = slice_seconds(module, parts)
        num_stages = seconds.shape[1]
        for part, slowest in zip(parts, seconds.max(axis=1), strict=True):
            samples[(part.end - part.begin) // granularity].append((part.begin, float(slowest)))
    problem = Problem(
        seconds=_table(samples, units, granularity)[None],
        num_samples=num_micro_batches,
        num_stages=num_stages,
    )
    found = solve(problem)
    whole = (BatchSlice(samples=1, lengths=(units,)),) * num_micro_batches
    tokens = [granularity * it for it in found.batch_slices[0].lengths]
    return tokens, found.seconds, latency(problem, whole)


def _doubling(units: int) -> list[int]:
    """Numbers that add up to `units`, each twice the one before as long as there are as many."""
    found = [1]
    while (left := units - sum(found)) > 0:
        size = sum(found)
        found.append(size if left >= size else left)
    return sorted(found)


def slice_seconds(module: ir.Module, parts: Sequence[Span]) -> np.ndarray:
    """What each mesh takes for the forward and backward of each slice: [slices, meshes]."""
    copy = cast(ir.Module, module.operation.clone().opview)
    main = main_function(copy)
    found = causal(main, parts[-1].end)
    with copy.context:
        sliced = SlicedStages(main, found.context, parts)
        sliced.rewrite()
    costs = FragmentCosts.of(main)
    names = dict.fromkeys(mesh_of(op) for op in sliced.fragments[0])
    meshes = {name: n for n, name in enumerate(names)}
    result = np.zeros((len(parts), len(meshes)))
    for part, fragments in zip(parts, sliced.fragments, strict=True):
        for op in fragments:
            result[part.number, meshes[mesh_of(op)]] += costs.seconds(op)
    return result


def _table(samples: dict[int, list[tuple[int, float]]], units: int, granularity: int) -> np.ndarray:
    """Seconds by length and context, in units, from samples (context in tokens, seconds)."""
    lengths = sorted(samples)
    lines: list[tuple[float, float]] = []
    for length in lengths:
        contexts, seconds = zip(*samples[length], strict=True)
        slope = lines[-1][1] if len(set(contexts)) == 1 and lines else 0.0
        if len(set(contexts)) > 1:
            slope = max(float(np.polyfit(contexts, seconds, 1)[0]), 0.0)
        lines.append((float(np.mean(seconds)) - slope * float(np.mean(contexts)), slope))
    every = np.arange(1, units + 1)
    alone, slope = (np.interp(every, lengths, [it[n] for it in lines]) for n in (0, 1))
    contexts = granularity * np.arange(units)
    return np.maximum(alone[:, None] + slope[:, None] * contexts, 0.0)
