"""Each pass states its contract, and does what the example in it shows."""

from __future__ import annotations

import re
import sys

import pytest

import alpa.passes
from alpa.passes.pipeline import PASSES, load_pass
from alpa.tools.pass_page import Contract, PageError


def is_printed_as(example: str, text: str) -> bool:
    """Whether a printed module matches an example.

    White space in the example matches any white space, also none. Comments do not count. `…` stands
    for any text, up to the first place where the example continues. Each `%name` stands for one
    name in the whole function.
    """
    example, text = re.sub(r"//.*", "", example).strip(), text.strip()
    if not example.startswith(("module {", "module attributes {")):
        text = text.removeprefix("module {").removesuffix("}").strip()
    functions = example.split("func.func")
    numbered = (re.sub(r"%(\w+)", rf"%\1_{n}", text) for n, text in enumerate(functions))
    parts = "func.func".join(numbered).split("…")
    names: dict[str, str] = {}
    end = 0
    for number, part in enumerate(parts):
        expression = _expression(part, names, is_last=number == len(parts) - 1)
        found = expression.search(text, end) if number else expression.match(text)
        if found is None:
            return False
        names |= found.groupdict()
        end = found.end()
    return True


def _expression(part: str, names: dict[str, str], *, is_last: bool) -> re.Pattern[str]:
    """A pattern that matches a part of an example. Its groups are the names that `names` lacks."""
    pieces: list[str] = []
    known = dict(names)
    for piece in re.split(r"(%\w+|\s+)", part):
        group = f"name_{piece[1:]}"
        if not piece.startswith("%"):
            pieces.append(r"\s*" if piece.isspace() else re.escape(piece))
        elif group in names:
            pieces.append(rf"{re.escape(names[group])}\b")
        elif group in known:
            pieces.append(rf"(?P={group})\b")
        else:
            known[group] = piece
            pieces.append(rf"(?P<{group}>%\w+)")
    return re.compile("".join(pieces) + (r"\s*\Z" if is_last else ""))


PRINTED = """
module {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (PRINTED, True),
        (
            "func.func public @main(%x: …) -> … { %y = stablehlo.add %x, %x : … return %y : … }",
            True,
        ),
        ("func.func public @main(\n    %x: …) … { … } // a comment", True),
        (
            "func.func public @main(%x: …) -> … { %y = stablehlo.add %x, %y : … return %y : … }",
            False,
        ),
        (
            "func.func public @main(%x: …) -> … { %y = stablehlo.sub %x, %x : … return %y : … }",
            False,
        ),
        ("func.func public @main(%x: …) -> … { %y = stablehlo.add %x, %x : tensor<4xf32>", False),
        ("func.func public @main(%x: …) -> … { %y = stablehlo.add %x, %x : tensor<4xf32> }", False),
        ("… @main(%x: tensor<4xf3>) …", False),
    ],
)
def test_examples_are_compared(pattern: str, expected: bool) -> None:
    assert is_printed_as(pattern, PRINTED) == expected


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_what_its_example_shows(name: str) -> None:
    contract = Contract.of(load_pass(name))
    assert contract.pipeline.partition("{")[0] == name
    after = str(alpa.passes.run(contract.before, contract.pipeline))
    assert is_printed_as(contract.after, after), after


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_has_every_section(name: str) -> None:
    kind = load_pass(name)
    contract = Contract.of(kind)
    assert contract.options == ("see the fields." if kind.own_options() else "none.")
    for text in (contract.requires, contract.ensures, contract.fails_when):
        assert text.endswith(".")


def test_a_section_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load_pass("donate-states")
    module = sys.modules[kind.__module__]
    doc = module.__doc__ or ""
    monkeypatch.setattr(module, "__doc__", doc.replace("**Requires**", "Requires"))
    with pytest.raises(PageError, match=r"donate-states: .* sections Before, After, Ensures"):
        Contract.of(kind)
    monkeypatch.setattr(module, "__doc__", doc.replace("**After**::", "**After**:"))
    with pytest.raises(PageError, match="donate-states: Before and After end with '::'"):
        Contract.of(kind)
