"""What the arguments and results of a step are: state, batch, keys, and how results are made whole.

**State** is what comes back. An argument, or a part of one, is state where the result holds a tree
of the same paths and types, and where the program donates it, or makes the new value of the old one
element by element, as optimizers do and gradients do not. `state_argnums` says it outright.

**The batch** is what `batch_argnums` says, else found by evidence: the program needs the dimensions
of some arguments to be equal (`micro_batches.dimensions`), and one class of dimensions are the
samples. It is one that arrays begin with that are neither state nor donated; of several the first
one for which the program is proven to be exact. What shares no dimension with it is constant, and
what shares one is no state, whatever comes back in its form: a residual, or the batch itself.

**Results** that are no state: one that grows with the batch is concatenated. Of the others,
numbers are averaged, or added up if the loss is a sum, and integers, which count, are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax.numpy as jnp

from alpa.dialects.attributes import ResultRole
from alpa.runtime.calls import Leaf, LeafType, Path, ResultLeaf

_SHOWN = 4


Nearest = Callable[[int], Mapping[int, int]]
"""For a result, the arguments that it is made of element by element, with their distances."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the user said, by the names of arguments."""

    donated: frozenset[str] = frozenset()
    batch: Mapping[str, int] | None = None
    """with the dimension that holds the samples"""
    state: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class _Match:
    """Leaves of an argument, by number, each with the result that may be its new value."""

    argument: str
    pairs: tuple[tuple[int, int], ...]


def state_pairs(
    leaves: Sequence[Leaf], results: Sequence[ResultLeaf], declared: Declared, nearest: Nearest
) -> dict[int, int]:
    """The number of each state argument -> that of its new value.

    Raises:
        ValueError: an argument that is said to be state, or that is donated, comes back changed.
    """
    found: list[_Match] = []
    for name in dict.fromkeys(leaf.argument for leaf in leaves):
        if name in (declared.batch or ()):
            continue
        if declared.state is None or name in declared.state:
            own = {leaf.path[1:]: n for n, leaf in enumerate(leaves) if leaf.argument == name}
            found += _matches(name, own, leaves, results)
    said = declared.donated if declared.state is None else declared.state
    pairs = _choose(found, said, nearest)
    _check_said(leaves, results, pairs, declared)
    return pairs


def _matches(
    name: str, own: Mapping[Path, int], leaves: Sequence[Leaf], results: Sequence[ResultLeaf]
) -> list[_Match]:
    """The parts of the result that look like an argument, or else like its parts."""
    wanted = {path: _strong(leaves[n]) for path, n in own.items()}
    found: list[_Match] = []
    for inside in _subtrees(results).values():
        if {path: results[r].type.strong for path, r in inside.items()} == wanted:
            pairs = tuple((n, inside[path]) for path, n in own.items())
            found.append(_Match(argument=name, pairs=pairs))
    if found or not all(own):
        return found
    parts: dict[Any, dict[Path, int]] = {}
    for path, n in own.items():
        parts.setdefault(path[0], {})[path[1:]] = n
    return [match for part in parts.values() for match in _matches(name, part, leaves, results)]


def _subtrees(results: Sequence[ResultLeaf]) -> dict[Path, dict[Path, int]]:
    """The results below each path, by what is left of theirs."""
    found: dict[Path, dict[Path, int]] = {}
    for r, result in enumerate(results):
        for depth in range(1, len(result.path) + 1):
            found.setdefault(result.path[:depth], {})[result.path[depth:]] = r
    return found


def _strong(leaf: Leaf) -> LeafType | None:
    return None if leaf.type is None else leaf.type.strong


def _choose(found: Sequence[_Match], said: Collection[str], nearest: Nearest) -> dict[int, int]:
    """Matches that take no leaf twice: those by the nearest data flow first, then in order."""
    ranked: list[tuple[float, int, _Match]] = []
    alone = {
        r: sum(any(r == other for _, other in match.pairs) for match in found)
        for match in found
        for _, r in match.pairs
    }
    for order, match in enumerate(found):
        if match.argument in said and all(alone[r] == 1 for _, r in match.pairs):
            ranked.append((0.0, order, match))
            continue
        distances = [d for n, r in match.pairs if (d := nearest(r).get(n)) is not None]
        if not any(distances):
            # All of it comes back unchanged: what is updated is rather the new state.
            distances = [d + 900 for d in distances]
        if distances or match.argument in said:
            # What is not reached at all counts as far away.
            far = len(match.pairs) - len(distances)
            ranked.append(((sum(distances) + 1000 * far) / len(match.pairs), order, match))
    pairs: dict[int, int] = {}
    for _, _, match in sorted(ranked, key=lambda entry: entry[:2]):
        taken = pairs.values()
        if all(n not in pairs and r not in taken for n, r in match.pairs):
            pairs.update(match.pairs)
    return pairs


def _check_said(
    leaves: Sequence[Leaf],
    results: Sequence[ResultLeaf],
    pairs: Mapping[int, int],
    declared: Declared,
) -> None:
    """What is said to be state has to be found; a donated argument that almost comes back, too."""
    for name in sorted((declared.state or frozenset()) | declared.donated):
        own = {leaf.path[1:]: n for n, leaf in enumerate(leaves) if leaf.argument == name}
        if not own or any(n in pairs for n in own.values()):
            continue
        inside = max(
            _subtrees(results).values(), key=lambda tree: len(own.keys() & tree.keys()), default={}
        )
        common = own.keys() & inside.keys()
        if name not in (declared.state or ()) and 2 * len(common) <= len(own):
            continue  # A buffer that is given away, and no state.
        texts = [
            f"{leaves[n].label} is {leaves[n].type} and comes back as {results[inside[p]].type}"
            for p, n in own.items()
            if p in inside and results[inside[p]].type.strong != _strong(leaves[n])
        ]
        texts += [
            f"{leaves[n].label} does not come back" for p, n in own.items() if p not in inside
        ]
        texts += [f"{results[r].label} is new" for p, r in inside.items() if p not in own]
        more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise ValueError(
            f"{name} is donated or said to be state, and the result holds no tree of the same "
            f"structure and types: {'; '.join(texts[:_SHOWN])}{more}. Return the new state as it "
            "was given"
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arrays that hold the samples, by number, each with the dimension that it is cut in, and
    how many samples there are; `reasons` say why an array was taken for a part of it, or not."""

    dims: Mapping[int, int] = field(default_factory=dict[int, int])
    size: int | None = None
    reasons: Mapping[int, str] = field(default_factory=dict[int, str])


class Evidence(Protocol):
    """What the program says of its arguments (`tracing.Evidence`)."""

    def classes(self) -> Mapping[tuple[int, int], int]:
        """For each argument and dimension the class of dimensions that have to be equal."""
        ...

    def reads(self, number: int) -> bool:
        """Whether anything is computed with an argument."""
        ...

    def is_exact(self, dims: Mapping[int, int]) -> bool:
        """Whether the program is proven to be exact where these arguments are cut."""
        ...


def find_batch(
    leaves: Sequence[Leaf],
    state: Collection[int],
    declared: Declared,
    keys: Collection[int],
    evidence: Evidence,
    *,
    several: bool,
) -> Batch:
    """The samples among the arguments.

    Args:
        leaves: the arguments' arrays.
        state: the numbers of those that may be state.
        declared: what the user said.
        keys: the numbers of random keys.
        evidence: what the program says.
        several: whether there are several micro-batches, which need a batch.

    Raises:
        ValueError: `several` micro-batches need a batch, and it cannot be told, or `batch_argnums`
            names arrays without the dimension, or of different numbers of samples.
    """
    if declared.batch is not None:
        return _said_batch(leaves, state, keys, declared.batch)
    said = declared.donated | (declared.state or frozenset())
    open_to = [
        n
        for n, leaf in enumerate(leaves)
        if leaf.type is not None and leaf.type.shape and n not in keys and leaf.argument not in said
    ]
    others = [n for n in open_to if n not in state]
    if not several:
        sizes = {_shape(leaves[n])[0] for n in others}
        if len(sizes) == 1:
            return Batch(dims=dict.fromkeys(others, 0), size=sizes.pop())
        return Batch()
    if not others:
        others = open_to
    if not others:
        raise ValueError(
            "there is no batch to cut into micro-batches: no array with a dimension is left that "
            "is neither state nor donated; say which arguments hold the samples with batch_argnums"
        )
    classes = evidence.classes()
    found = _candidates(leaves, open_to, others, classes)
    # What nothing reads shows nothing.
    found = [it for it in found if any(evidence.reads(n) for n in it[1])] or found
    first, *more = [dims for _, dims in found]
    # What leaves out an array that begins with samples is rather a dimension of features.
    rest = [it for it in more if it.keys() >= first.keys() or not it.keys() & first.keys()]
    shown = [first, *rest]
    chosen = next((dims for dims in shown if len(shown) == 1 or evidence.is_exact(dims)), None)
    if chosen is None:
        raise ValueError(
            "the arrays that hold the samples cannot be told, since the program mixes them or "
            f"draws numbers for them: they may be {_candidates_text(leaves, shown)}; say which "
            "arguments hold the samples with batch_argnums, and the dimension where that is not "
            'the first: batch_argnums={"x": 1}'
        )
    size = _shape(leaves[min(chosen)])[chosen[min(chosen)]]
    reasons = {n: _shared_with(leaves, chosen, n) for n in chosen}
    reasons |= {
        n: "no dimension of it is the samples'" for n in open_to if n not in chosen and n in others
    }
    return Batch(dims=chosen, size=size, reasons=reasons)


def _candidates_text(leaves: Sequence[Leaf], found: Sequence[Mapping[int, int]]) -> str:
    """The arrays that may be the batch, one of each group with its dimension."""
    first = [min(dims) for dims in found[:_SHOWN]]
    texts = [
        f"{leaves[n].label}, {_shape(leaves[n])[dims[n]]} along dimension {dims[n]}"
        for n, dims in zip(first, found, strict=False)
    ]
    return "; ".join(texts[:-1]) + f"; or {texts[-1]}"


def _shared_with(leaves: Sequence[Leaf], dims: Mapping[int, int], n: int) -> str:
    """Why an array is of the batch."""
    other = next((m for m in dims if m != n), None)
    if other is None:
        return "no other array that is neither state nor donated begins with samples"
    return f"the program needs it to be as long as {leaves[other].label} in dimension {dims[other]}"


def _shape(leaf: Leaf) -> tuple[int, ...]:
    return () if leaf.type is None else leaf.type.shape


def _said_batch(
    leaves: Sequence[Leaf],
    state: Collection[int],
    keys: Collection[int],
    said: Mapping[str, int],
) -> Batch:
    dims: dict[int, int] = {}
    for n, leaf in enumerate(leaves):
        if leaf.argument not in said or n in state or n in keys or not _shape(leaf):
            continue
        dim = said[leaf.argument]
        if not 0 <= dim < len(_shape(leaf)):
            raise ValueError(
                f"batch_argnums says that {leaf.label} holds the samples in dimension {dim}, and "
                f"it is {leaf.type}; name a dimension that it has"
            )
        dims[n] = dim
    sizes = {n: _shape(leaves[n])[d] for n, d in dims.items()}
    if not sizes:
        raise ValueError(
            f"there is no batch to cut into micro-batches: no array with a dimension in "
            f"{', '.join(sorted(said))}; say which arguments hold the samples with batch_argnums"
        )
    if len({*sizes.values()}) > 1:
        examples = {size: n for n, size in reversed(sizes.items())}
        shown = [f"{leaves[n].label} has {size}" for size, n in list(examples.items())[:_SHOWN]]
        raise ValueError(
            f"the arrays of the batch have different numbers of samples: {', '.join(shown)}; name "
            "in batch_argnums the arguments that hold the samples only, and the dimension where "
            'that is not the first: batch_argnums={"x": 1}'
        )
    reasons = dict.fromkeys(dims, "batch_argnums says so")
    return Batch(dims=dims, size=next(iter(sizes.values())), reasons=reasons)


def _candidates(
    leaves: Sequence[Leaf],
    open_to: Sequence[int],
    others: Sequence[int],
    classes: Mapping[tuple[int, int], int],
) -> list[tuple[tuple[bool, int], dict[int, int]]]:
    """What may be the samples: for each class of dimensions that an array begins with, the arrays
    that have it, with the dimension. Those that only lead come first, then those of most arrays."""
    found: list[tuple[tuple[bool, int], dict[int, int]]] = []
    for class_ in dict.fromkeys(classes[n, 0] for n in others):
        dims = {
            n: d
            for n in open_to
            for d in range(len(_shape(leaves[n])) - 1, -1, -1)
            if classes[n, d] == class_
        }
        found.append(((any(dims.values()), -len(dims)), dims))
    return sorted(found, key=lambda it: it[0])


def result_role(
    result: ResultLeaf, whole: LeafType, num_micro_batches: int, loss_reduction: str
) -> ResultRole:
    """How a result that is no state is made of those of the micro-batches.

    `result` is that of a micro-batch, `whole` the type at the whole batch.

    Raises:
        ValueError: the result grows, and not with the batch.
    """
    small, large = result.type.shape, whole.shape
    grown = [d for d, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) != len(large) or len(grown) > 1:
        raise ValueError(_grows(result, whole, num_micro_batches))
    if grown:
        (dim,) = grown
        if small[dim] * num_micro_batches != large[dim]:
            raise ValueError(_grows(result, whole, num_micro_batches))
        return ResultRole("concat", dim)
    # A flag has no sum: one that the update makes needs none, the plan refuses any other.
    is_float = jnp.issubdtype(result.type.dtype, jnp.inexact)
    return ResultRole("mean" if is_float and loss_reduction == "mean" else "sum")


def _grows(result: ResultLeaf, whole: LeafType, num_micro_batches: int) -> str:
    return (
        f"{result.label} is {result.type} for one of {num_micro_batches} micro-batches and {whole} "
        "for the whole batch; a result has to be the same for both, or grow with the batch in one "
        "dimension"
    )
