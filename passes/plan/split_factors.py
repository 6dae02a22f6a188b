"""Along what a sharded stage is split over each axis of its mesh, in words.

Contractions and convolutions decide, by their FLOPs. An axis may be on

* the `batch`;
* a dimension of their weights: `hidden` where it is contracted or passes through, as Megatron's
  column and row splits are, `experts` where it numbers the weights;
* another dimension of the activations: `positions` beside weights, in a sequence or an image, and
  `heads` where activations meet activations;
* nothing: then the axis' devices repeat one another's work.

Weights are what no batch dimension goes into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from alpa.dialects import body, func, ir, stablehlo, walk
from alpa.passes.analysis import op_cost
from alpa.passes.plan.annotated import Annotated
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.rules import RuleOf

NOTHING = "nothing"
_MINOR = 0.1
"""Of an axis' FLOPs: what takes less is not mentioned."""


class SplitFactors:
    """Reads the splits of fragments whose ops carry their sharding rules."""

    def __init__(self, function: func.FuncOp, rule_of: RuleOf) -> None:
        self._rule_of = rule_of
        self._batch = BatchDims(function, rule_of)

    def of(self, fragments: Iterable[Annotated]) -> dict[str, Counter[str]]:
        """FLOPs by word, for each axis of more than one device; empty without contractions."""
        found: dict[str, Counter[str]] = {}
        for annotated in fragments:
            mesh = annotated.mesh
            for op in walk(body(annotated.fragment)):
                if not isinstance(op, stablehlo.DotGeneralOp | stablehlo.ConvolutionOp):
                    continue
                words = self._words(op, annotated)
                for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.sizes, strict=True)):
                    if size > 1:
                        counts = found.setdefault(name, Counter())
                        counts[words.get(axis, NOTHING)] += int(op_cost.flops(op))
        return found

    def _words(self, op: ir.OpView, annotated: Annotated) -> dict[int, str]:
        """What each axis splits in an op."""
        rule = self._rule_of(op)
        if rule is None:
            return {}
        batch = self._batch.factors(op, rule)
        weights = [
            {factor for dim in dims for factor in dim}
            for value, dims in zip(op.operands, rule.operands, strict=True)
            if value not in self._batch.of
        ]
        everywhere = [
            {factor for dim in dims for factor in dim} for dims in (*rule.operands, *rule.results)
        ]
        words: dict[int, str] = {}
        mapped = zip([*op.results, *op.operands], [*rule.results, *rule.operands], strict=True)
        for value, dims in mapped:
            for factors, axes in zip(dims, annotated.layout(value), strict=False):
                for axis in axes:
                    if not factors or axis in words:
                        continue
                    factor = factors[0]
                    if factor in batch:
                        words[axis] = "batch"
                    elif len(weights) == len(rule.operands):
                        words[axis] = "work"  # Nobody knows what the batch is.
                    elif not weights:
                        words[axis] = "heads"
                    elif not any(factor in used for used in weights):
                        words[axis] = "positions"
                    else:
                        numbers = all(factor in used for used in everywhere)
                        words[axis] = "experts" if numbers else "hidden"
        return words


def in_words(splits: dict[str, Counter[str]]) -> str:
    """`batch on axis0, hidden on axis1`; an axis that is used in several ways has their shares."""
    phrases: dict[str, list[str]] = {}
    idle: list[str] = []
    for axis, counts in splits.items():
        total = sum(counts.values())
        used = [(word, flops) for word, flops in counts.most_common() if flops >= _MINOR * total]
        words = [word for word, _ in used]
        if words == [NOTHING] or not total:
            idle.append(axis)
        elif len(used) == 1:
            phrases.setdefault(words[0], []).append(axis)
        else:
            shares = " or ".join(f"{word} ({flops / total:.0%})" for word, flops in used)
            phrases.setdefault(shares, []).append(axis)
    texts = [f"{phrase} on {' and '.join(axes)}" for phrase, axes in phrases.items()]
    if idle:
        texts.append(f"nothing on {' and '.join(idle)}, whose devices repeat one another's work")
    return ", ".join(texts)
