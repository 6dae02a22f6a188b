"""How many of a fragment's collectives are left once XLA for GPUs has combined them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from alpa.dialects import ir
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.predicted_collectives import Collective, collectives_in_order
from alpa.passes.sharding.combining import COMBINED_KINDS, LIMIT
from alpa.passes.sharding.rules import populated


def combined_counts(collectives: Iterable[Collective]) -> Counter[str]:
    """The numbers by kind. Independent collectives over the same axes are joined in order, until
    the next one's result would exceed `LIMIT`."""
    counts: Counter[str] = Counter()
    filled: dict[tuple[str, tuple[str, ...]], float] = {}
    for it in collectives:
        if not it.independent or it.kind not in COMBINED_KINDS:
            counts[it.kind] += it.count
            continue
        key = (it.kind, it.axes)
        for _ in range(it.count):
            joined = filled.get(key, LIMIT) + it.result_bytes
            if joined > LIMIT:
                counts[it.kind] += 1
                joined = it.result_bytes
            filled[key] = joined
    return counts


def predicted_counts(module: ir.Module) -> list[Counter[str]]:
    """For each fragment of a planned module, in program order: `combined_counts` of one execution.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    with populated(module):
        return [combined_counts(collectives_in_order(it)) for it in annotated_fragments(module)]
