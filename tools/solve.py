"""Solves a bare instance of the intra-operator parallelism contest (ASPLOS 2025).

    python -m alpa.tools.solve CASE.json[.gz] [--time-limit SECONDS] [-o CHOICE.json]

The file holds nodes with half-open intervals, costs and usages per strategy, edges with row-major
cost matrices, and one usage limit that holds at every time. A cost of 10^18 or more forbids a
strategy, or a pair of strategies.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.ilp import Edge, Problem, Usage
from alpa.tools.arguments import amount, share
from alpa.tools.interrupts import until_interrupted

FORBIDDEN = 1e18
"""The cost that stands for "never" in the contest's files."""


class CaseError(ValueError):
    """The file is not an instance; the message says where and why."""


def read_case(document: Any) -> Problem:
    """Builds the problem of a parsed contest file.

    Raises:
        CaseError: something is missing or inconsistent.
    """
    problem = _get(document, "problem", "the file")
    nodes, edges = _get(problem, "nodes", "problem"), _get(problem, "edges", "problem")
    costs = [_costs(c, f"costs of node {v}") for v, c in enumerate(_get(nodes, "costs", "nodes"))]
    held = [_vector(u, f"usages of node {v}") for v, u in enumerate(_get(nodes, "usages", "nodes"))]
    intervals = _get(nodes, "intervals", "nodes")
    if not len(costs) == len(held) == len(intervals):
        raise CaseError(
            f"nodes have {len(costs)} costs, {len(held)} usages and {len(intervals)} intervals"
        )
    ends, matrices = _get(edges, "nodes", "edges"), _get(edges, "costs", "edges")
    if len(ends) != len(matrices):
        raise CaseError(f"edges have {len(ends)} pairs of nodes and {len(matrices)} costs")
    limit = problem.get("usage_limit")
    return Problem(
        node_costs=tuple(costs),
        edges=tuple(
            _edge(number, pair, matrix, costs)
            for number, (pair, matrix) in enumerate(zip(ends, matrices, strict=True))
        ),
        usages=tuple(
            Usage(nodes=(v,), bytes=held[v], start=start, stop=stop)
            for v, (start, stop) in enumerate(
                _pair(i, f"interval {v}") for v, i in enumerate(intervals)
            )
            if start < stop
        ),
        memory_limit=float("inf") if limit is None else float(limit),
    )


def _get(parent: Any, key: str, where: str) -> Any:
    if not isinstance(parent, dict) or key not in parent:
        raise CaseError(f'{where} has no "{key}"')
    return parent[key]


def _vector(numbers: Any, what: str) -> np.ndarray:
    try:
        vector = np.array(numbers, dtype=float)
    except (TypeError, ValueError) as error:
        raise CaseError(f"{what} are not a list of numbers: {error}") from error
    if vector.ndim != 1:
        raise CaseError(f"{what} are not a list of numbers")
    return vector


def _costs(numbers: Any, what: str) -> np.ndarray:
    costs = _vector(numbers, what)
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _pair(numbers: Any, what: str) -> tuple[int, int]:
    if (
        not isinstance(numbers, list)
        or len(numbers) != 2
        or not all(isinstance(number, int) for number in numbers)
    ):
        raise CaseError(f"{what} is {numbers}, not two integers")
    return numbers[0], numbers[1]


def _edge(number: int, pair: Any, matrix: Any, costs: Sequence[np.ndarray]) -> Edge:
    source, target = _pair(pair, f"edge {number}")
    if not (0 <= source < len(costs) and 0 <= target < len(costs)):
        raise CaseError(f"edge {number} joins {source} and {target}; there are {len(costs)} nodes")
    entries = _costs(matrix, f"costs of edge {number}")
    shape = (costs[source].size, costs[target].size)
    if entries.size != shape[0] * shape[1]:
        raise CaseError(
            f"edge {number} has {entries.size} costs; its nodes have {shape[0]} x {shape[1]} "
            "strategies"
        )
    return Edge(source, target, entries.reshape(shape))


def load_case(path: Path) -> Problem:
    """Reads and checks a file. Raises ``CaseError`` and ``OSError``."""
    data = path.read_bytes()
    try:
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        problem = read_case(json.loads(text))
        problem.check()
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise CaseError(f"cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise CaseError(f"is not JSON: {error}") from error
    except ValueError as error:
        raise CaseError(str(error)) from error
    return problem


def number(value: float) -> str:
    """Formats a number with all its digits, and integers without a point, as the contest does."""
    return np.format_float_positional(value, trim="-")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.solve",
        description="Solves an instance of the ASPLOS 2025 contest on intra-operator parallelism "
        "and prints objective, bound, memory and seconds.",
        epilog="example: python -m alpa.tools.solve case.json.gz --time-limit 60 -o choice.json",
    )
    result.add_argument("file", type=Path, metavar="FILE.json[.gz]")
    result.add_argument(
        "--time-limit",
        type=amount,
        default=300.0,
        metavar="SECONDS",
        help="seconds, after which the best assignment is printed with its bound (default: 300)",
    )
    result.add_argument(
        "--gap",
        type=share,
        default=1e-9,
        help="stop at this relative gap between objective and bound",
    )
    result.add_argument(
        "-o", type=Path, metavar="CHOICE.json", help="where to write the strategy of each node"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        problem = load_case(options.file)
        solution = ilp.solve(problem, time_limit=options.time_limit, branch_gap=options.gap)
        if options.o is not None:
            options.o.write_text(json.dumps(list(solution.choice)) + "\n")
    # A TimeoutError is an OSError, too.
    except (CaseError, TimeoutError) as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ilp.InfeasibleError as error:
        print(f"error: {options.file}: infeasible: {error}", file=sys.stderr)
        return 1
    except ilp.SolverFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    limit = "no limit" if problem.memory_limit == float("inf") else number(problem.memory_limit)
    print(f"objective: {number(solution.objective)}")
    print(f"bound: {number(solution.bound)}")
    print(f"peak usage: {number(solution.peak_bytes)} of {limit}")
    print(f"seconds: {solution.seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(until_interrupted("solve", main))
