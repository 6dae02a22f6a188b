"""Finds the roles of a step's arguments and results: state, batch, keys, and combined results.

**State** has a new value among the results. An argument, or a part of one, is state if the result
holds a tree with the same paths and types, and the program either donates the argument or computes
the new value from the old one element by element, as optimizers do. `state_argnums` decides it
directly.

**The batch** is given by `batch_argnums`, or found by evidence. The program requires the dimensions
of some arguments to be equal (`micro_batches.dimensions`), and one class of such dimensions holds
the samples. Candidates are classes that contain the first dimension of an array which is neither
state nor donated, and of one that looks like state and shares another dimension with those. Among
several, the first for which the program is proven exact is taken. An array that shares no dimension
with the class is constant. An array that shares one is not state, even if a result has its form: it
is a residual, or the batch itself.

**Results** that are not state: a result that grows with the batch is concatenated. Other results
are averaged, or added up if the loss is a sum. Integers are counts, and are added up.
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
"""For a result, the arguments that it is computed from element by element, with distances."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The user's declarations, by the names of arguments."""

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
    """Maps the number of each state argument to the number of its new value.

    Raises:
        ValueError: an argument that is declared as state or donated has a result of another type.
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
    """Finds the parts of the result that look like an argument, or else like its parts."""
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
    """Maps each path to the results below it, by the rest of their paths."""
    found: dict[Path, dict[Path, int]] = {}
    for r, result in enumerate(results):
        for depth in range(1, len(result.path) + 1):
            found.setdefault(result.path[:depth], {})[result.path[depth:]] = r
    return found


def _strong(leaf: Leaf) -> LeafType | None:
    return None if leaf.type is None else leaf.type.strong


def _same_shape(leaf: Leaf, result: ResultLeaf) -> bool:
    return leaf.type is not None and leaf.type.shape == result.type.shape


def _choose(found: Sequence[_Match], said: Collection[str], nearest: Nearest) -> dict[int, int]:
    """Selects matches that use no leaf twice: first the nearest by data flow, then in order."""
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
            # The argument comes back unchanged: a match with an updated value is preferred.
            distances = [d + 900 for d in distances]
        if distances or match.argument in said:
            # A value that is not reached counts as far away.
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
    """Checks that declared state is found, and donated arguments that almost match."""
    taken = {*pairs.values()}
    free = [
        {path: r for path, r in tree.items() if r not in taken}
        for tree in _subtrees(results).values()
    ]
    for name in sorted((declared.state or frozenset()) | declared.donated):
        own = {leaf.path[1:]: n for n, leaf in enumerate(leaves) if leaf.argument == name}
        if not own or any(n in pairs for n in own.values()):
            continue
        inside = max(free, key=lambda tree: len(own.keys() & tree.keys()), default={})
        if name not in (declared.state or ()):
            like = [
                p
                for p in own.keys() & inside.keys()
                if _same_shape(leaves[own[p]], results[inside[p]])
            ]
            if 2 * len(like) <= len(own) or name in (declared.batch or ()):
                continue  # A donated buffer that is not state.
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
            f"{name} is donated or declared as state, but the result holds no tree of the same "
            f"structure and types: {'; '.join(texts[:_SHOWN])}{more}. Return the new state with "
            "the structure and types of the old one"
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arrays that hold samples, by number, with the dimension to split, and the number of
    samples. `reasons` explain why an array belongs to the batch or not."""

    dims: Mapping[int, int] = field(default_factory=dict[int, int])
    size: int | None = None
    reasons: Mapping[int, str] = field(default_factory=dict[int, str])


class Evidence(Protocol):
    """The properties of a program's arguments (`tracing.Evidence`)."""

    def classes(self) -> Mapping[tuple[int, int], int]:
        """Maps each argument and dimension to its class of dimensions that must be equal."""
        ...

    def reads(self, number: int) -> bool:
        """Whether any computation uses an argument."""
        ...

    def is_exact(self, dims: Mapping[int, int]) -> bool:
        """Whether the program is proven exact if these arguments are split."""
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
    """Finds the samples among the arguments.

    Args:
        leaves: the arguments' arrays.
        state: the numbers of those that may be state.
        declared: the user's declarations.
        keys: the numbers of random keys.
        evidence: properties of the program.
        several: whether there are several micro-batches, which need a batch.

    Raises:
        ValueError: `several` is set and the batch is ambiguous, or `batch_argnums` names arrays
            without the dimension or with different numbers of samples.
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
            "there is no batch to cut into micro-batches: every array with a dimension is state or "
            "donated; name the arguments that hold samples in batch_argnums"
        )
    classes = evidence.classes()
    found = _candidates(leaves, open_to, others, classes)
    # An argument that nothing reads gives no evidence.
    found = [it for it in found if any(evidence.reads(n) for n in it[1])] or found
    first, *more = [dims for _, dims in found]
    # A class without an array that begins with samples is more likely a feature dimension.
    rest = [it for it in more if it.keys() >= first.keys() or not it.keys() & first.keys()]
    shown = [first, *rest]
    # What comes back like a state may be a residual: the batch, if another class is its features.
    residuals = [n for n in open_to if n not in others and any(it.get(n, 0) for it in shown)]
    shown += [it for _, it in _candidates(leaves, open_to, residuals, classes) if it not in shown]
    chosen = next((dims for dims in shown if len(shown) == 1 or evidence.is_exact(dims)), None)
    if chosen is None:
        raise ValueError(
            "the arrays that hold the samples are ambiguous, because the program mixes samples or "
            f"draws numbers for them. Candidates are {_candidates_text(leaves, shown)}; name the "
            "arguments that hold samples in batch_argnums, with the dimension if it is not the "
            'first: batch_argnums={"x": 1}'
        )
    size = _shape(leaves[min(chosen)])[chosen[min(chosen)]]
    reasons = {n: _shared_with(leaves, chosen, n) for n in chosen}
    reasons |= {
        n: "no dimension of it holds samples" for n in open_to if n not in chosen and n in others
    }
    return Batch(dims=chosen, size=size, reasons=reasons)


def _candidates_text(leaves: Sequence[Leaf], found: Sequence[Mapping[int, int]]) -> str:
    """Describes the arrays that may be the batch: one of each group, with its dimension."""
    first = [min(dims) for dims in found[:_SHOWN]]
    texts = [
        f"{leaves[n].label}, {_shape(leaves[n])[dims[n]]} along dimension {dims[n]}"
        for n, dims in zip(first, found, strict=False)
    ]
    return "; ".join(texts[:-1]) + f"; or {texts[-1]}"


def _shared_with(leaves: Sequence[Leaf], dims: Mapping[int, int], n: int) -> str:
    """Explains why an array belongs to the batch."""
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
                f"batch_argnums says that {leaf.label} holds the samples in dimension {dim}, but "
                f"it is {leaf.type}; name one of its dimensions"
            )
        dims[n] = dim
    sizes = {n: _shape(leaves[n])[d] for n, d in dims.items()}
    if not sizes:
        raise ValueError(
            f"there is no batch to cut into micro-batches: {', '.join(sorted(said))} hold no array "
            "with a dimension; name the arguments that hold samples in batch_argnums"
        )
    if len({*sizes.values()}) > 1:
        examples = {size: n for n, size in reversed(sizes.items())}
        shown = [f"{leaves[n].label} has {size}" for size, n in list(examples.items())[:_SHOWN]]
        raise ValueError(
            f"the arrays of the batch have different numbers of samples: {', '.join(shown)}; name "
            "only the arguments that hold samples in batch_argnums, with the dimension if it is "
            'not the first: batch_argnums={"x": 1}'
        )
    reasons = dict.fromkeys(dims, "batch_argnums names it")
    return Batch(dims=dims, size=next(iter(sizes.values())), reasons=reasons)


def _candidates(
    leaves: Sequence[Leaf],
    open_to: Sequence[int],
    others: Sequence[int],
    classes: Mapping[tuple[int, int], int],
) -> list[tuple[tuple[bool, int], dict[int, int]]]:
    """Returns candidates for the samples: for each class of leading dimensions, its arrays with
    the dimension. Classes of only leading dimensions come first, then classes of most arrays."""
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
    """Decides how the values of a result that is not state are combined over the micro-batches.

    `result` is that of a micro-batch, `whole` the type at the whole batch.

    Raises:
        ValueError: the result grows, but not in proportion to the batch.
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
    # A flag has no sum. The update's flags need none; the plan refuses others.
    is_float = jnp.issubdtype(result.type.dtype, jnp.inexact)
    return ResultRole("mean" if is_float and loss_reduction == "mean" else "sum")


def _grows(result: ResultLeaf, whole: LeafType, num_micro_batches: int) -> str:
    return (
        f"{result.label} is {result.type} for one of {num_micro_batches} micro-batches and {whole} "
        "for the whole batch; a result must have the same size for both, or grow with the batch in "
        "one dimension"
    )
