"""Which values the stages of a cut exchange, by the classes of their layers.

Values that stay for each micro-batch in flight are counted as activations instead: those that a
layer's backward part reads of its own forward part, and of other layers' forward parts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alpa.passes.stages.layer_classes import LayerClasses

End = tuple[int, int]
"""A class, and a result or an argument of its program."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """How many values of each kind a stage of layers i to j exchanges: arrays [K, K]."""

    sent: dict[End, np.ndarray]
    """by the class that makes them, and the result"""
    received: dict[End, np.ndarray]
    """by the class that reads them first in the stage, and the argument"""

    @classmethod
    def of(cls, classes: LayerClasses) -> Exchange:
        count = len(classes.class_of)
        sent: dict[End, np.ndarray] = defaultdict(lambda: np.zeros((count, count)))
        received: dict[End, np.ndarray] = defaultdict(lambda: np.zeros((count, count)))
        for (maker, result), readers in _readers(classes).items():
            end = (classes.class_of[maker], result)
            stays = result in classes.classes[end[0]].stays
            behind = sorted(layer for layer in readers if layer > maker)
            before = sorted((layer for layer in readers if layer < maker), reverse=True)
            if behind and not stays:
                sent[end][: maker + 1, maker : behind[-1]] += 1
            if before and not stays:
                sent[end][before[-1] + 1 : maker + 1, maker:] += 1
            # A stage receives a value once, for the reader that is nearest to the maker.
            for nearer, layer in pairwise([maker, *behind]):
                first = (classes.class_of[layer], readers[layer])
                received[first][nearer + 1 : layer + 1, layer:] += 1
            for nearer, layer in pairwise([maker, *before]):
                first = (classes.class_of[layer], readers[layer])
                received[first][: layer + 1, layer:nearer] += 1
        for number, argument in list(received):
            if argument in classes.classes[number].kept:
                del received[number, argument]
        return cls(sent=dict(sent), received=dict(received))


def _readers(classes: LayerClasses) -> dict[tuple[int, int], dict[int, int]]:
    """The readers of each (layer, result) in a micro-batch: the argument of each layer."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for link, pairs in classes.links.items():
        if link.part != "update":
            for producer, reader in pairs:
                found[producer, link.result][reader] = link.argument
    return found
