from __future__ import annotations

import gzip
import json
from itertools import product
from math import inf
from typing import Any
from unittest.mock import patch

import pytest

from alpa.tools import solve

CASE: dict[str, Any] = {
    "problem": {
        "name": "three nodes",
        "nodes": {
            "intervals": [[0, 10], [5, 20], [10, 20]],
            "costs": [[4, 9], [7, 1, 3], [5, 2]],
            "usages": [[6, 2], [1, 8, 4], [3, 7]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 5, 2, 3, 0, 9], [1, 0, 4, 6, 2, 0]]},
        "usage_limit": 11,
    }
}


def brute_force(case: dict[str, Any]) -> tuple[int, int]:
    """(objective, peak) of the best choice."""
    problem = case["problem"]
    nodes, edges, limit = problem["nodes"], problem["edges"], problem["usage_limit"]
    best = None
    for choice in product(*(range(len(costs)) for costs in nodes["costs"])):
        peak = max(
            sum(
                nodes["usages"][v][choice[v]]
                for v, (start, stop) in enumerate(nodes["intervals"])
                if start <= time < stop
            )
            for time in range(20)
        )
        cost = sum(costs[i] for costs, i in zip(nodes["costs"], choice, strict=True))
        for (u, v), matrix in zip(edges["nodes"], edges["costs"], strict=True):
            cost += matrix[choice[u] * len(nodes["costs"][v]) + choice[v]]
        if peak <= limit and (best is None or cost < best[0]):
            best = (cost, peak)
    assert best is not None
    return best


def lines(capsys) -> dict[str, str]:
    return dict(line.split(": ") for line in capsys.readouterr().out.splitlines())


def changed(*path: Any, to: Any) -> str:
    case = json.loads(json.dumps(CASE))
    parent = case
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = to
    return json.dumps(case)


@pytest.mark.parametrize("limit", [9, 11, 15])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_prints_the_optimum_within_the_limit(tmp_path, capsys, limit, suffix):
    text = changed("problem", "usage_limit", to=limit)
    file = tmp_path / f"case{suffix}"
    file.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    out = tmp_path / "choice.json"
    assert solve.main([str(file), "-o", str(out)]) == 0
    objective, peak = brute_force(json.loads(text))
    printed = lines(capsys)
    assert printed["objective"] == printed["bound"] == str(objective)
    assert printed["peak usage"] == f"{peak} of {limit}"
    assert float(printed["seconds"]) >= 0
    assert len(json.loads(out.read_text())) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'the file has no "problem"'),
        (changed("problem", "nodes", "usages", to=[[1, 2]]), "3 costs, 1 usages and 3 intervals"),
        (
            changed("problem", "nodes", "intervals", 1, to=[1]),
            "interval 1 is [1], not two integers",
        ),
        (
            changed("problem", "nodes", "costs", 0, to=["a"]),
            "costs of node 0 are not a list of numbers",
        ),
        (changed("problem", "edges", "nodes", 0, to=[0, 7]), "edge 0 joins 0 and 7"),
        (changed("problem", "edges", "costs", 1, to=[1, 2]), "edge 1 has 2 costs"),
        (changed("problem", "usage_limit", to=3), "infeasible: at least 4 bytes are needed"),
        (
            changed("problem", "nodes", "costs", 0, to=[10**18, 10**18]),
            "infeasible: node 0 has no strategy of finite cost",
        ),
        (
            changed("problem", "edges", "costs", 0, to=[10**18] * 6),
            "infeasible: nodes 0, 1 have no strategies that are allowed together",
        ),
    ],
)
def test_an_error_is_one_sentence(tmp_path, capsys, text, words):
    file = tmp_path / "case.json"
    file.write_text(text)
    assert solve.main([str(file)]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


def test_a_missing_file_and_a_broken_archive(tmp_path, capsys):
    assert solve.main([str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    broken = tmp_path / "case.json.gz"
    broken.write_bytes(b"\x1f\x8bnot much of an archive")
    assert solve.main([str(broken)]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_forbidden_pair_is_never_taken(tmp_path, capsys):
    text = changed("problem", "usage_limit", to=None)
    file = tmp_path / "case.json"
    file.write_text(text)
    out = tmp_path / "choice.json"
    assert solve.main([str(file), "-o", str(out)]) == 0
    choice = json.loads(out.read_text())
    cheapest = int(lines(capsys)["objective"])
    file.write_text(changed_pair(text, choice))
    assert solve.main([str(file), "-o", str(out)]) == 0
    other = json.loads(out.read_text())
    assert other[:2] != choice[:2]
    assert cheapest < int(lines(capsys)["objective"]) < solve.FORBIDDEN


def changed_pair(text: str, choice: list[int]) -> str:
    """The case where the first edge forbids the pair of a choice."""
    case = json.loads(text)
    matrix = case["problem"]["edges"]["costs"][0]
    matrix[choice[0] * len(case["problem"]["nodes"]["costs"][1]) + choice[1]] = 10**18
    return json.dumps(case)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2569342178123.0, "2569342178123"),
        (12345678901.25, "12345678901.25"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e22, "10000000000000000000000"),
        (-inf, "-inf"),
    ],
)
def test_numbers_are_printed_in_full(value, text):
    assert solve.number(value) == text


def test_too_little_time_is_an_error_of_its_own(tmp_path, capsys):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE))
    message = "the time limit came before any choice was found"
    with patch.object(solve.ilp, "solve", side_effect=TimeoutError(message)):
        assert solve.main([str(file)]) == 1
    assert capsys.readouterr().err == f"error: {file}: {message}\n"
