"""Marks the gradients of a step that was differentiated by jax, as `alpa.grad` does.

jax names its ops by the transformations that they went through: what differentiation adds is called
`transpose(jvp())/...`, which the locations of a module keep. The gradients are what leaves these
ops for the rest of the step. To be found before anything is simplified: the gradient of a factor of
the loss is the other factor times one, a value of the forward part where the product is gone.

A step may differentiate what it made of a gradient (adversarial samples, sharpness-aware
minimisation): then those of the last differentiation are meant. Programs that return what they
differentiate again (a second loss after a first update), and samples one by one, get no markers:
their gradients are found by analysis (`analysis/step_parts.py`).

The front end marks what it lowers. The passes read names only where each micro-batch is a batch of
its own: with exact micro-batches no number depends on the markers.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import ir, stablehlo, terminator, transform
from alpa.dialects.attributes import GRADIENT, WHOLE, marker_of
from alpa.dialects.records import entries
from alpa.passes.analysis.graph import replace_operands, used_values


def mark_gradients(block: ir.Block) -> None:
    """Puts a marker on each gradient, unless the program marks its own."""
    ops = list(block.operations)
    if any(marker_of(op) == GRADIENT for op in ops):
        return
    made_by = [transform(op.location) for op in ops]
    if "transpose" not in made_by or "vmap" in made_by:
        return
    again = _differentiated_again(ops, made_by)
    inside: set[ir.Value] = set()
    """what differentiation makes"""
    after: set[ir.Value] = set()
    """what is made of gradients"""
    updated: set[ir.Value] = set()
    """what is made of gradients, and differentiated again"""
    readers: list[tuple[ir.OpView, list[ir.Value]]] = []
    for op, kind in zip(ops, made_by, strict=True):
        used = dict.fromkeys(used_values(op))
        if kind == "transpose":
            inside.update(op.results)
            continue
        gradients = [value for value in used if value in inside]
        if not gradients and not after.intersection(used):
            continue
        after.update(op.results)
        if kind is not None:
            continue
        if again.intersection(op.results):
            updated.update(op.results)
        elif gradients:
            readers.append((op, gradients))
    if updated.intersection(terminator(block).operands):
        return
    markers: dict[ir.Value, ir.Value] = {}
    for op, gradients in readers:
        for value in gradients:
            if value not in markers:
                markers[value] = _marker(value)
        replace_operands(op, {value: markers[value] for value in gradients})


def _differentiated_again(ops: Sequence[ir.OpView], made_by: Sequence[str | None]) -> set[ir.Value]:
    """The values that a differentiation reads, or what one reads is made of."""
    found: set[ir.Value] = set()
    for op, kind in zip(reversed(ops), reversed(made_by), strict=True):
        if kind is not None or found.intersection(op.results):
            found.update(used_values(op))
    return found


def _marker(value: ir.Value) -> ir.Value:
    """A marker on a value, which says of the whole batch what the value's op says."""
    maker = value.owner
    assert not isinstance(maker, ir.Block)
    with ir.InsertionPoint.after(maker), maker.location:
        marker = stablehlo.CustomCallOp([value.type], [value], GRADIENT)
    differs = maker.attributes.get(WHOLE)
    types = None if differs is None else entries(ir.DictAttr(differs)).get("types")
    if types is not None:
        own = ir.ArrayAttr(types)[ir.OpResult(value).result_number]
        whole: dict[str, ir.Attribute] = {"types": ir.ArrayAttr.get([own])}
        marker.attributes[WHOLE] = ir.DictAttr.get(whole)
    return marker.results[0]
