"""The features of a random program besides blocks, optimizer and options, with their labels.

Features are drawn from their own random stream, so the blocks of a seed do not change. Most
programs have features that are exact; some have one that mixes samples. With several micro-batches,
these must be refused, or run with each micro-batch as a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from stress.random_programs import layouts, noise
from stress.random_programs.gradients import WAYS
from stress.random_programs.insertions import INSERTIONS, Insertion
from stress.random_programs.layouts import Layout
from stress.random_programs.losses import LOSSES
from stress.random_programs.metrics import METRICS
from stress.random_programs.optimizers import WRAPPERS
from stress.random_programs.states import STATES
from stress.random_programs.truth import Truth

_STREAM = 0xFEA7
_BY_NAME = {insertion.name: insertion for insertion in INSERTIONS}
_LOOPED_WAYS = frozenset({"once", "sharpness-aware"})


class Labelled(Protocol):
    """A feature with its label."""

    @property
    def truth(self) -> Truth: ...


@dataclass(frozen=True, kw_only=True)
class Keys:
    """How random numbers are drawn: their kind, the derivation of the key, and the key's place."""

    kind: str = "bits"
    way: str = "given"
    typed: bool = False
    in_state: bool = False
    """whether the key lies in the state, which takes the next one"""
    returned: bool = False
    """whether the next key is a result"""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Names from the tables of each kind; `insertions` have the number of the preceding block."""

    insertions: tuple[tuple[int, str], ...] = ()
    loss: str = "mean"
    states: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    way: str = "once"
    wrapper: str = "none"
    keys: Keys = field(default_factory=Keys)
    layout: Layout = field(default_factory=Layout)
    mode: Literal["exact", "independent"] = "exact"

    def __str__(self) -> str:
        notes = [f"{name} behind {number}" for number, name in self.insertions]
        notes += [f"loss: {self.loss}"] if self.loss != "mean" else []
        notes += [f"states: {', '.join(self.states)}"] if self.states else []
        notes += [f"metrics: {', '.join(self.metrics)}"] if self.metrics else []
        notes += [f"gradients {self.way}"] if self.way != "once" else []
        notes += [f"optimizer {self.wrapper}"] if self.wrapper != "none" else []
        notes += [f"{self.keys}"] if self.keys != Keys() else []
        notes += [f"layout: {self.layout}"] if self.layout != Layout() else []
        return "; ".join([*notes, self.mode])

    def behind(self, block: int) -> list[tuple[int, Insertion]]:
        """The insertions after a block, each with its number in the program."""
        pairs = enumerate(self.insertions)
        return [(n, _BY_NAME[name]) for n, (at, name) in pairs if at == block]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of ops in the insertions."""
        """All features by name, with their kind if the name alone is unclear."""
        return frozenset[str]().union(*(_BY_NAME[name].kinds for _, name in self.insertions))

    @property
    def names(self) -> tuple[str, ...]:
        """All features by name, with their kind where names say little."""
        names = [name for _, name in self.insertions]
        names += [] if self.loss == "mean" else [f"loss: {self.loss}"]
        names += [f"state: {name}" for name in self.states]
        names += [f"metric: {name}" for name in self.metrics]
        names += [] if self.way == "once" else [f"gradients {self.way}"]
        names += [] if self.wrapper == "none" else [f"optimizer {self.wrapper}"]
        keys = {"in the state": self.keys.in_state, "returned": self.keys.returned}
        names += [f"key {name}" for name, is_there in keys.items() if is_there]
        plain = Layout()
        names += [] if self.layout == plain else [f"layout: {self._layout_kind}"]
        return tuple(names)

    @property
    def _layout_kind(self) -> str:
        said = "said" if self.layout.said else "by evidence"
        return f"{said}, beside a table" if self.layout.weights else said

    @property
    def reads(self) -> frozenset[str]:
        """Inputs that only some insertions read."""
        return frozenset[str]().union(*(_BY_NAME[name].reads for _, name in self.insertions))

    @property
    def draws(self) -> bool:
        """Whether a feature draws random numbers."""
        return any(_BY_NAME[name].draws for _, name in self.insertions)

    @property
    def truth(self) -> Truth:
        """The largest label of a feature."""
        found: list[Labelled] = [_BY_NAME[name] for _, name in self.insertions]
        found += [STATES[name] for name in self.states]
        found += [METRICS[name] for name in self.metrics]
        found += [LOSSES[self.loss], WAYS[self.way]]
        return max(feature.truth for feature in found)

    @property
    def looped(self) -> bool:
        """Whether a loop of plain JAX over micro-batches is the reference for independent ones."""
        alone = not self.states and not self.metrics and self.way in _LOOPED_WAYS
        return alone and self.layout.said

    def independent(self) -> Features:
        """The features that allow each micro-batch to be a batch of its own."""
        way = self.way if self.way in _LOOPED_WAYS else "once"
        layout = replace(self.layout, said=True) if self.layout.is_sayable else Layout()
        return replace(self, states=(), metrics=(), way=way, mode="independent", layout=layout)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The properties of a program before its features are drawn."""

    seed: int
    training: bool
    narrow: bool
    blocks: int
    groups: int
    """of parameters"""
    micro_batch: int
    inputs: frozenset[str]
    running: bool
    """whether it has running means, which mix samples"""
    dropout: bool

    @property
    def truth(self) -> Truth:
        if self.running:
            return Truth.MIXED
        return Truth.NOISE if self.dropout else Truth.EXACT


def draw(base: Base) -> Features:
    """Draws the features of a seed."""
    generator = np.random.default_rng([_STREAM, base.seed])
    features = _exact(generator, base)
    if generator.random() < (0.42 if base.truth < Truth.MIXED else 0.1):
        features = _mixed(generator, base, features)
    if WAYS[features.way].alone and (base.truth, _others(features)) != (Truth.EXACT,) * 2:
        features = replace(features, way="once")
    features = replace(features, keys=_keys(generator, base, features))
    names = base.inputs | features.reads
    features = replace(features, layout=layouts.draw(generator, names))
    mixed = max(base.truth, features.truth) == Truth.MIXED
    return features.independent() if generator.random() < (0.28 if mixed else 0.04) else features


def _others(features: Features) -> Truth:
    """The largest label without that of the way."""
    return replace(features, way="once").truth


def _chosen(
    generator: np.random.Generator,
    table: Mapping[str, Any],
    truths: Sequence[Truth],
    allowed: Callable[[Any], bool],
) -> str | None:
    names = [n for n, it in table.items() if it.truth in truths and allowed(it)]
    return str(generator.choice(names)) if names else None


def _exact(generator: np.random.Generator, base: Base) -> Features:
    """Draws features that mix no samples; few of them may be refused."""

    def allowed(feature: Any) -> bool:
        return not (base.narrow and getattr(feature, "jumps", False))

    def chosen(table: Mapping[str, Any]) -> str | None:
        truths = [Truth.EITHER] if generator.random() < 0.06 else [Truth.EXACT, Truth.NOISE]
        return _chosen(generator, table, truths, allowed)

    insertions: list[tuple[int, str]] = []
    for _ in range(int(generator.choice([0, 1, 2], p=[0.3, 0.5, 0.2]))):
        name = chosen(_BY_NAME)
        kinds = frozenset[str]().union(
            *(_BY_NAME[n].kinds for n in (name, *(n for _, n in insertions)) if n)
        )
        # XLA 0.10.2 fails with both on a CPU, at the layout of the transform's input.
        if name is not None and not kinds >= {"fft", "linear algebra"}:
            insertions.append((int(generator.integers(base.blocks)), name))
    metrics: list[str] = []
    if generator.random() < 0.35:
        usable = {n: m for n, m in METRICS.items() if base.training or not m.of_training}
        name = _chosen(generator, usable, [Truth.EXACT], allowed)
        metrics += [] if name is None else [name]
    features = Features(insertions=tuple(insertions), metrics=tuple(metrics))
    if not base.training:
        return features
    states: set[str] = set()
    if generator.random() < 0.5:
        exact = [name for name, state in STATES.items() if state.truth == Truth.EXACT]
        count = int(generator.integers(1, 4))
        states = {str(name) for name in generator.choice(exact, count, replace=False)}
    way = "once"
    if generator.random() < 0.25:
        way = chosen(WAYS) or "once"
        if base.micro_batch % WAYS[way].parts:
            way = "once"
    return replace(
        features,
        states=tuple(sorted(states)),
        loss=(chosen(LOSSES) if generator.random() < 0.5 else None) or "mean",
        way=way,
        wrapper=str(generator.choice(list(WRAPPERS))) if generator.random() < 0.4 else "none",
    )


def _mixed(generator: np.random.Generator, base: Base, features: Features) -> Features:
    """Adds one feature that mixes samples."""

    def allowed(feature: Any) -> bool:
        return not (base.narrow and getattr(feature, "jumps", False))

    def chosen(table: Mapping[str, Any]) -> str:
        found = _chosen(generator, table, [Truth.MIXED], allowed)
        assert found is not None
        return found

    kinds = ["insertion", "loss", "state", "way", "metric"]
    shares = [0.42, 0.28, 0.12, 0.08, 0.1] if base.training else [0.8, 0, 0, 0, 0.2]
    kind = generator.choice(kinds, p=shares)
    if kind == "loss":
        return replace(features, loss=chosen(LOSSES))
    if kind == "state":
        return replace(features, states=(*features.states, chosen(STATES)))
    if kind == "metric":
        usable = {n: m for n, m in METRICS.items() if base.training or not m.of_training}
        name = _chosen(generator, usable, [Truth.MIXED], allowed)
        return features if name is None else replace(features, metrics=(*features.metrics, name))
    if kind == "way":
        way = chosen(WAYS)
        return features if way == "in turn" and base.groups < 2 else replace(features, way=way)
    at = int(generator.integers(base.blocks))
    return replace(features, insertions=(*features.insertions, (at, chosen(_BY_NAME))))


def _keys(generator: np.random.Generator, base: Base, features: Features) -> Keys:
    draws = features.draws or base.dropout
    in_state = bool(base.training and draws and generator.random() < 0.2)
    return Keys(
        kind=str(generator.choice(noise.KINDS)) if features.draws else "bits",
        way=str(generator.choice(noise.WAYS)) if features.draws else "given",
        typed=bool(generator.random() < 0.5),
        in_state=in_state,
        returned=bool(base.training and generator.random() < 0.15),
    )
