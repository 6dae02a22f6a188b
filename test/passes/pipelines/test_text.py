"""The text of a pipeline: its meaning, and the places of its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.pipelines.text import Element, PipelineError, element_text, parse


def outline(elements: tuple[Element, ...]) -> list[object]:
    """Names, options and nesting, without positions."""
    return [
        (element.name, outline(element.nested))
        if element.nested is not None
        else (element.name, {option.key: option.value for option in element.options})
        for element in elements
    ]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", []),
        ("cse", [("cse", {})]),
        (" cse ,\n canonicalize{} ", [("cse", {}), ("canonicalize", {})]),
        ("a{x=1 y-z=h100:1x8}", [("a", {"x": "1", "y-z": "h100:1x8"})]),
        ("a { flag other=no }", [("a", {"flag": "true", "other": "no"})]),
        ("a{x= y=2}", [("a", {"x": "", "y": "2"})]),
        ("a{x=1,2,3},b", [("a", {"x": "1,2,3"}), ("b", {})]),
        ("a{x='two words' y=\"a } b\"}", [("a", {"x": "two words", "y": "a } b"})]),
        ("a{x={y=1 z=2}}", [("a", {"x": "y=1 z=2"})]),
        ("a{x={1}{2}}", [("a", {"x": "{1}{2}"})]),
        ("a{x=[1 2] y=f(a b)}", [("a", {"x": "[1 2]", "y": "f(a b)"})]),
        ("a{x='1'-'2'}", [("a", {"x": "'1'-'2'"})]),
        ("f(a,g(b{x=1}),c)", [("f", [("a", {}), ("g", [("b", {"x": "1"})]), ("c", {})])]),
        ("func.func()", [("func.func", [])]),
        ("builtin.module(a,b)", [("a", {}), ("b", {})]),
        ("any(a)", [("a", {})]),
        ("builtin.module(a),b", [("builtin.module", [("a", {})]), ("b", {})]),
    ],
)
def test_parse(text: str, meaning: list[object]) -> None:
    assert outline(parse(text)) == meaning


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (",", 1, 1, "expected the name of a pass, found ','"),
        ("cse,", 1, 5, "expected the name of a pass, found the end"),
        ("cse cse", 1, 5, "expected ',' after 'cse'"),
        ("cse)", 1, 4, "expected ',' after 'cse'"),
        ("f(a", 1, 2, "'(' is never closed by ')'"),
        ("f(a}", 1, 4, "expected ',' or ')' after 'a'"),
        ("a{x=1", 1, 2, "'{' is never closed by '}'"),
        ("a{x=1 x=2}", 1, 7, "option 'x' is given twice"),
        ("a{x = 1}", 1, 5, "expected the name of an option, found '='"),
        ("a{x='1}", 1, 5, "the quote ' is never closed"),
        ("a{x=[1 2}", 1, 5, "']' is missing in the value"),
        ("cse,\n  a{=1}", 2, 5, "expected the name of an option, found '='"),
    ],
)
def test_wrong_syntax_is_pointed_at(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse(text)
    error = caught.value
    assert (error.line, error.column, error.message, error.text) == (line, column, message, text)


def test_pipelines_are_nested_100_deep_at_most() -> None:
    assert parse("a(" * 100 + "b" + ")" * 100)
    with pytest.raises(PipelineError, match=r"^pipeline:1:202: .*nested more than 100 deep"):
        parse("a(" * 5000 + "b" + ")" * 5000)


def test_error_shows_its_line_and_column() -> None:
    with pytest.raises(PipelineError) as caught:
        parse("cse,\n\ta{b=1 b=2},\ncse")
    assert str(caught.value).splitlines() == [
        "pipeline:2:8: error: option 'b' is given twice",
        "   a{b=1 b=2},",
        "         ^",
    ]


def test_source_of_an_element_is_what_was_written() -> None:
    first, second = parse(" func.func( cse , canonicalize ), a{ x=1 } ")
    assert (first.source, second.source) == ("func.func( cse , canonicalize )", "a{ x=1 }")


names = st.from_regex(r"[a-z][a-z0-9.\-]*", fullmatch=True)
values = st.text(st.characters(codec="utf-8"), max_size=20).filter(
    lambda value: not ('"' in value and "'" in value)
)


@given(names, st.dictionaries(names, values))
def test_parse_reads_what_element_text_writes(name: str, options: dict[str, str]) -> None:
    assert outline(parse(element_text(name, dict(options)))) == [(name, options)]


def test_element_text_says_values_as_options_do() -> None:
    options = {"num_layers": 4, "fold": True, "file": "a b.toml"}
    assert element_text("alpa", options) == 'alpa{num-layers=4 fold=true file="a b.toml"}'
    with pytest.raises(ValueError, match="both kinds of quotes"):
        element_text("a", {"x": "'\""})


def is_read(text: str) -> bool:
    """Whether the text parses; if not, checks that the error's place is inside the text."""
    try:
        parse(text)
    except PipelineError as error:
        line = text.split("\n")[error.line - 1]
        return not 1 <= error.column <= len(line) + 1
    return True


@given(st.text("ab=,(){}[]'\" \n", max_size=30))
def test_any_text_is_read_or_refused_at_a_place(text: str) -> None:
    if is_read(text):
        assert all(is_read(element.source) for element in parse(text))
