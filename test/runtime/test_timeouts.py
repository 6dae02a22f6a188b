"""Every wait in the runtime has a timeout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import alpa.runtime

WAITS = {("ray", "get"), ("ray", "wait"), ("socket", "create_connection")}


def calls(source: str) -> Iterator[tuple[ast.Call, tuple[str, str]]]:
    """Calls of functions of modules, `module.function(...)`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if isinstance(node.func.value, ast.Name):
            yield node, (node.func.value.id, node.func.attr)


def without_timeout(source: str) -> list[int]:
    """The lines of waits without a timeout."""
    return [
        call.lineno
        for call, name in calls(source)
        if name in WAITS and "timeout" not in {keyword.arg for keyword in call.keywords}
    ]


def test_all_waits_have_a_timeout() -> None:
    files = list(Path(alpa.runtime.__file__).parent.rglob("*.py"))
    found = {file.name: without_timeout(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert sum(name in WAITS for file in files for _, name in calls(file.read_text())) >= 5


def test_a_wait_for_ever_is_found() -> None:
    assert without_timeout("x = 1\nray.get(ref)\nray.wait(refs, timeout=1)") == [2]
