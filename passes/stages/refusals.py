"""Why no cut was found, in words: what the layers hold at least, and where they have no plan.

The least is that of the few shardings per mesh that the stage search costs (`candidates.PRICES`,
`LAST_PRICE`), and of bounds where none were costed. Others may hold less where links are so slow
that even the last price is too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alpa.passes.cost.device import size_text
from alpa.passes.stages.candidates import Candidate
from alpa.passes.stages.clustered import Clustered


def shortage(program: Clustered, candidates: Sequence[Candidate]) -> str:
    """The least of what does not fit, of a layer, else of all layers; and what would help."""
    return _needs(program, [it for it in candidates if not it.problem]) + _narrower(program)


def problems(candidates: Iterable[Candidate]) -> str:
    """Why there is no plan on some submeshes."""
    found = {it.problem: it.submesh for it in candidates if it.problem}
    return "".join(f"; {n}x{m}: {problem}" for problem, (n, m, _) in found.items())


def _needs(program: Clustered, possible: Sequence[Candidate]) -> str:
    kinds = program.left
    largest = max((kind.device for kind in kinds), key=lambda device: device.memory)
    layers = range(len(possible[0].seconds))
    need, layer, size = max(
        min(((o.fixed_bytes + o.activation_bytes)[k, k], k, o.size) for o in possible)
        for k in layers
    )
    if need >= largest.memory:
        return (
            f"In the shardings that were tried, layer_{layer} alone holds at least "
            f"{size_text(need)} on each of {size} device(s); {largest.name} has "
            f"{size_text(largest.memory)}"
        )
    fixed = min(o.size * o.fixed_bytes[0, -1] for o in possible)
    kept = min(o.size * o.activation_bytes[0, -1] for o in possible)
    there = " and ".join(
        f"{kind.num_devices} {kind.device.name} have "
        f"{size_text(kind.num_devices * kind.device.memory)}"
        for kind in kinds
    )
    return (
        f"In the shardings that were tried, all layers hold at least {size_text(fixed)} and, for "
        f"each micro-batch in flight, {size_text(kept)}; {there}"
    )


def _narrower(program: Clustered) -> str:
    """What narrower sums over the micro-batches would save."""
    if not program.widened_bytes:
        return ""
    return (
        f". Adding up gradients in {program.plan.accumulate_dtype} takes "
        f"{size_text(program.widened_bytes)} more in all than in their own types, which "
        "accumulate-dtype=same keeps"
    )
