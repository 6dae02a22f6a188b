"""How many of a fragment's collectives are left once XLA for GPUs has combined them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from alpa.dialects import ir
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.predicted_collectives import Placed, collectives_in_order
from alpa.passes.sharding.combining import LIMIT
from alpa.passes.sharding.rules import populated


def combined_counts(collectives: Iterable[Placed]) -> Counter[str]:
    """The numbers by kind, of collectives in program order.

    Those of one key are joined in order, until the next one waits for one of them or its result
    would exceed `LIMIT`.
    """
    counts: Counter[str] = Counter()
    # Of combined collectives to which more may be added: the members, as bits, and their bytes.
    opened: dict[tuple[object, ...] | None, tuple[int, float]] = {}
    for number, (one, key, waits_for, _) in enumerate(collectives):
        members, joined = opened.get(key, (0, inf))
        joined += one.result_bytes
        if members & waits_for or joined > LIMIT:
            counts[one.kind] += one.count
            members, joined = 0, one.result_bytes
        if key is not None:
            opened[key] = members | 1 << number, joined
    return counts


def predicted_counts(module: ir.Module) -> list[Counter[str]]:
    """For each fragment of a planned module, in program order: `combined_counts` of one execution.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    with populated(module):
        return [combined_counts(collectives_in_order(it)) for it in annotated_fragments(module)]
