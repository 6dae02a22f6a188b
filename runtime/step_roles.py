"""What the arguments and results of a step are: state, batch, keys, and how results are made whole.

**State** is what comes back. An argument, or a part of one, is state where the result holds a tree
of the same paths and types, and where the program donates it, or makes the new value of the old one
element by element, as optimizers do and gradients do not. `state_argnums` says it outright.

**The batch** is what `batch_argnums` says, else the arguments that are no state and not donated:
those whose arrays have one leading dimension, the samples. Parameters that are only read do not,
and are constant. Numbers are no batch, and a random key is none: it is folded with the number of
the micro-batch.

**Results** that are no state: one that grows with the batch is concatenated. Of the others,
numbers are averaged, or added up if the loss is a sum, and integers, which count, are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    batch: frozenset[str] | None = None
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


def batch_leaves(
    leaves: Sequence[Leaf], state: Collection[int], declared: Declared, *, several: bool
) -> tuple[frozenset[int], int | None]:
    """The numbers of the batch's arrays, and the samples in it: their leading dimension.

    None where the arguments leave it open, which matters with several micro-batches only.

    Raises:
        ValueError: `several` micro-batches need a batch, and it cannot be told, or `batch_argnums`
            names arrays of different leading dimensions.
    """
    if declared.batch is not None:
        names = declared.batch
    else:
        states = {leaves[n].argument for n in state} | declared.donated
        names = {leaf.argument for leaf in leaves} - states
    found: dict[str, dict[int, int]] = {}
    for n, leaf in enumerate(leaves):
        type_ = leaf.type
        if leaf.argument not in names or n in state or type_ is None:
            continue
        if type_.shape and not type_.is_key:
            found.setdefault(leaf.argument, {})[n] = type_.shape[0]
    if declared.batch is None:
        agreed = {name: own for name, own in found.items() if len({*own.values()}) == 1}
        if several and not state and len(agreed) == len(found) > 1:
            raise ValueError(
                f"each of {', '.join(found)} could hold the samples, or parameters that are only "
                "read; say which arguments hold the samples with batch_argnums"
            )
        found = agreed or found
    sizes = {n: size for own in found.values() for n, size in own.items()}
    if len({*sizes.values()}) == 1:
        return frozenset(sizes), next(iter(sizes.values()))
    if declared.batch is None and not several:
        return frozenset(), None
    if not sizes:
        where = f" in {', '.join(sorted(names))}" if names else ""
        raise ValueError(
            f"there is no batch to cut into micro-batches: no array with a dimension{where}; say "
            "which arguments hold the samples with batch_argnums"
        )
    examples = {size: n for n, size in reversed(sizes.items())}
    shown = [f"{leaves[n].label} has {size}" for size, n in list(examples.items())[:_SHOWN]]
    raise ValueError(
        f"the arrays of the batch have different leading dimensions: {', '.join(shown)}; say which "
        "arguments hold the samples with batch_argnums, and keep other arrays out of them"
    )


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
