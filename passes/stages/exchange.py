"""Which values the stages of a cut exchange, by the classes of their layers.

Values that stay for each micro-batch in flight are counted as activations instead: those that a
layer's backward part reads of its own forward part, and of other layers' forward parts.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from alpa.passes.stages.layer_classes import LayerClasses

End = tuple[bool, int, int]
"""Whether a value is sent, the class that makes it or else reads it first in the stage, and the
number of the result or argument of that class's program."""


def exchanged_values(classes: LayerClasses) -> dict[End, np.ndarray]:
    """How many values of each kind a stage of layers i to j exchanges: arrays [K, K]."""
    count = len(classes.class_of)
    found: dict[End, np.ndarray] = defaultdict(lambda: np.zeros((count, count)))
    for (maker, result), readers in _readers(classes).items():
        number = classes.class_of[maker]
        behind = sorted(layer for layer in readers if layer > maker)
        before = sorted((layer for layer in readers if layer < maker), reverse=True)
        if result not in classes.classes[number].stays:
            if behind:
                found[True, number, result][: maker + 1, maker : behind[-1]] += 1
            if before:
                found[True, number, result][before[-1] + 1 : maker + 1, maker:] += 1
        # A stage receives a value once, for the reader that is nearest to the maker.
        for nearer, layer in [*pairwise([maker, *behind]), *pairwise([maker, *before])]:
            reader, argument = classes.class_of[layer], readers[layer]
            if argument in classes.classes[reader].kept:
                continue
            received = found[False, reader, argument]
            if layer > maker:
                received[nearer + 1 : layer + 1, layer:] += 1
            else:
                received[: layer + 1, layer:nearer] += 1
    return dict(found)


def _readers(classes: LayerClasses) -> dict[tuple[int, int], dict[int, int]]:
    """The readers of each (layer, result) in a micro-batch: the argument of each layer."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for link, pairs in classes.links.items():
        if link.part != "update":
            for producer, reader in pairs:
                found[producer, link.result][reader] = link.argument
    return found
