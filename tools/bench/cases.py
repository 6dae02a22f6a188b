"""Sharding problems in files, as the passes pose them, for `alpa.tools.bench`.

A ``.npz`` file holds every array of a ``Problem`` once. The contest's JSON format cannot express
several usages of a node, usages of pairs of nodes, and forbidden strategies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from alpa.passes.solve.sharding.problem import Edge, Problem, Usage
from alpa.tools.solve import CaseError, load_case

Class = Literal["free", "memory", "prices", "contest"]
"""``free``: the cheapest assignment fits into memory. ``memory``: it does not. ``prices``: posed by
the stage search, at several dual prices of a byte. ``contest``: an instance of the contest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A problem, and how to solve it."""

    name: str
    kind: Class
    problem: Problem
    gap: float
    """the relative gap at which branch and bound stops; with prices, that of the whole search"""
    prices: tuple[float, ...] = ()
    """dual prices for ``pareto.solve``, for the class ``prices``"""
    enough: float = inf
    """the bound at which ``pareto.solve`` stops"""


def save(case: Case, folder: Path) -> Path:
    """Writes ``NAME.npz`` and returns its path."""
    problem = case.problem
    held = {id(usage.bytes): usage.bytes for usage in problem.usages}
    number = {key: k for k, key in enumerate(held)}
    about = {
        "kind": case.kind,
        "gap": case.gap,
        "prices": case.prices,
        "enough": case.enough,
        "memory_limit": problem.memory_limit,
    }
    path = folder / f"{case.name}.npz"
    np.savez_compressed(
        path,
        about=np.array(json.dumps(about)),
        node_sizes=np.array([costs.size for costs in problem.node_costs], dtype=np.int64),
        node_costs=_flat(problem.node_costs),
        edges=np.array([(e.source, e.target) for e in problem.edges], dtype=np.int64).reshape(
            -1, 2
        ),
        edge_costs=_flat(edge.costs for edge in problem.edges),
        # For each usage: first and last node, number of nodes, array, from, until.
        usages=np.array(
            [
                (u.nodes[0], u.nodes[-1], len(u.nodes), number[id(u.bytes)], u.start, u.stop)
                for u in problem.usages
            ],
            dtype=np.int64,
        ).reshape(-1, 6),
        bytes_sizes=np.array([array.size for array in held.values()], dtype=np.int64),
        bytes=_flat(held.values()),
    )
    return path


def load(path: Path) -> Case:
    """Reads a saved case, or an instance of the contest (``.json``, ``.json.gz``).

    Raises:
        CaseError: the file is neither.
        OSError: it cannot be read.
    """
    if ".json" in path.suffixes:
        name = path.name.split(".", maxsplit=1)[0]
        return Case(name=name, kind="contest", problem=load_case(path), gap=1e-9)
    try:
        with np.load(path) as arrays:
            case = _case(path.stem, dict(arrays))
        case.problem.check()
    except (ValueError, KeyError, IndexError) as error:
        raise CaseError(f"{path}: not a saved problem: {error}") from error
    return case


def _case(name: str, arrays: dict[str, np.ndarray]) -> Case:
    about: dict[str, Any] = json.loads(str(arrays["about"]))
    if about["kind"] not in get_args(Class):
        raise ValueError(f"class {about['kind']!r} is unknown")
    nodes = _split(arrays["node_costs"], arrays["node_sizes"])
    ends = arrays["edges"].tolist()
    matrices = _split(arrays["edge_costs"], [nodes[u].size * nodes[v].size for u, v in ends])
    held = _split(arrays["bytes"], arrays["bytes_sizes"])
    shaped: dict[tuple[int, int, int, int], np.ndarray] = {}
    usages: list[Usage] = []
    for first, last, count, k, start, stop in arrays["usages"].tolist():
        key = (first, last, count, k)
        if key not in shaped:
            shaped[key] = held[k].reshape(tuple(nodes[v].size for v in (first, last)[:count]))
        usages.append(Usage(nodes=(first, last)[:count], bytes=shaped[key], start=start, stop=stop))
    return Case(
        name=name,
        kind=cast("Class", about["kind"]),
        problem=Problem(
            node_costs=tuple(nodes),
            edges=tuple(
                Edge(u, v, matrix.reshape(nodes[u].size, nodes[v].size))
                for (u, v), matrix in zip(ends, matrices, strict=True)
            ),
            usages=tuple(usages),
            memory_limit=about["memory_limit"],
        ),
        gap=about["gap"],
        prices=tuple(about["prices"]),
        enough=about["enough"],
    )


def _flat(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])


def _split(flat: np.ndarray, sizes: Iterable[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [flat[begin:end] for begin, end in pairwise(ends)]
