"""Finds the batch dimensions in the programs of layer classes.

A class's program knows its batch arguments. Values from other layers have the batch dimension that
their programs give them. Dimensions are followed along the links until nothing changes.
"""

from __future__ import annotations

from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.rules import rule_of
from alpa.passes.stages.layer_classes import LayerClasses


def class_batches(classes: LayerClasses) -> tuple[BatchDims, ...]:
    """The batch's dimensions in each class's program."""
    layers = classes.classes
    known: list[dict[int, int]] = [{} for _ in layers]
    found = [BatchDims(layer.function, rule_of) for layer in layers]
    results = [layer.returned for layer in layers]
    fresh = set(range(len(layers)))
    while fresh:
        changed: set[int] = set()
        for link in classes.links:
            dim = found[link.producer].of.get(results[link.producer][link.result])
            if link.producer not in fresh or dim is None:
                continue
            if known[link.reader].setdefault(link.argument, dim) == dim:
                value = layers[link.reader].function.entry_block.arguments[link.argument]
                if value not in found[link.reader].of:
                    changed.add(link.reader)
        for reader in changed:
            found[reader] = BatchDims(layers[reader].function, rule_of, known[reader])
        fresh = changed
    sizes = set[int]().union(*(one.sizes for one in found))
    for one in found:
        one.sizes.update(sizes)
    return tuple(found)
