"""Marks the gradients of a step that was differentiated by jax, as `alpa.grad` does.

jax names its ops by the transformations that they went through: what differentiation adds is called
`transpose(jvp())/...`, which the locations of a module keep. The gradients are what leaves these
ops. To be found before anything is simplified: the gradient of a factor of the loss is the other
factor times one, a value of the forward part where the product is gone.

Programs without locations have no names, and their gradients are found by analysis
(`analysis/step_parts.py`). So are those of programs that go on to differentiate what they made of a
gradient (adversarial samples, a second loss after a first update), and of samples one by one.
"""

from __future__ import annotations

from alpa.dialects import ir, stablehlo, transform, walk
from alpa.dialects.attributes import GRADIENT, marker_of
from alpa.passes.analysis.graph import used_values


def mark_gradients(block: ir.Block) -> None:
    """Puts a marker on each gradient, unless the program marks its own."""
    ops = list(block.operations)
    if any(marker_of(op) == GRADIENT for op in ops):
        return
    made_by = [transform(op.location) for op in ops]
    if "transpose" not in made_by or "vmap" in made_by:
        return
    inside: set[ir.Value] = set()
    """what differentiation makes"""
    after: set[ir.Value] = set()
    """what is made of gradients"""
    readers: list[tuple[ir.OpView, set[ir.Value]]] = []
    for op, kind in zip(ops, made_by, strict=True):
        used = set(used_values(op))
        if (kind is not None and used & after) or (kind == "jvp" and used & inside):
            return
        if kind == "transpose":
            inside.update(op.results)
            continue
        if gradients := used & inside:
            readers.append((op, gradients))
        if gradients or used & after:
            after.update(op.results)
    markers: dict[ir.Value, ir.Value] = {}
    for op, gradients in readers:
        for value in gradients - markers.keys():
            markers[value] = _marker(value)
        for reader in (op, *(inner for region in op.regions for b in region for inner in walk(b))):
            for number, value in enumerate(reader.operands):
                if value in gradients:
                    reader.operands[number] = markers[value]


def _marker(value: ir.Value) -> ir.Value:
    maker = value.owner
    assert not isinstance(maker, ir.Block)
    with ir.InsertionPoint.after(maker), maker.location:
        return stablehlo.CustomCallOp([value.type], [value], GRADIENT).results[0]
