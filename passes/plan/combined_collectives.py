"""How many of a fragment's collectives are left once XLA for GPUs has combined them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from alpa.dialects import ir
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.predicted_collectives import Placed, collectives_in_order
from alpa.passes.sharding.combining import LIMIT
from alpa.passes.sharding.rules import populated


class _Open(NamedTuple):
    """A combined collective to which more may be added."""

    members: int
    """bit i: the i-th collective of the fragment"""
    result_bytes: float


def combined_counts(collectives: Iterable[Placed]) -> Counter[str]:
    """The numbers by kind, of collectives in program order.

    Those of one key are joined in order, until the next one waits for one of them or its result
    would exceed `LIMIT`.
    """
    counts: Counter[str] = Counter()
    opened: dict[tuple[object, ...], _Open] = {}
    for number, (one, key, waits_for) in enumerate(collectives):
        last = opened.get(key) if key is not None else None
        joins = (
            last is not None
            and not last.members & waits_for
            and last.result_bytes + one.result_bytes <= LIMIT
        )
        if not joins:
            counts[one.kind] += one.count
            last = _Open(0, 0.0)
        if key is not None and last is not None:
            opened[key] = _Open(last.members | 1 << number, last.result_bytes + one.result_bytes)
    return counts


def predicted_counts(module: ir.Module) -> list[Counter[str]]:
    """For each fragment of a planned module, in program order: `combined_counts` of one execution.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    with populated(module):
        return [combined_counts(collectives_in_order(it)) for it in annotated_fragments(module)]
