"""Diagnostics: their places, and those that a source expects."""

from __future__ import annotations

import pytest

import alpa.passes
from alpa.dialects import ir, make_context, parse
from alpa.passes.pipelines.diagnostics import (
    Diagnostic,
    Place,
    format_error,
    listening,
    place_of,
)
from alpa.passes.pipelines.expected import mismatches, read_expected


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ('"f.py":3:4', "f.py:3:4"),
        ('"jit(step)/add"("f.py":3:4)', "f.py:3:4"),
        ('callsite("inner"("f.py":3:4) at "g.py":5:6)', "f.py:3:4"),
        ('fused<"pass">["nowhere", "f.py":3:4]', "f.py:3:4"),
        ('"only a name"', "only a name"),
        ("unknown", "unknown"),
    ],
)
def test_place_is_the_first_position_inside(location: str, place: str) -> None:
    module = parse(f"module {{ }} loc({location})")
    assert str(place_of(module.operation.location)) == place


def test_an_error_names_the_first_position_inside() -> None:
    text = """
      func.func @main(%x: tensor<4xf32>) {
        %0 = stablehlo.custom_call @xla_python_cpu_callback(%x) : (tensor<4xf32>) -> tensor<4xf32>
          loc("jit(f)"(callsite("f.py":3:4 at "g.py":5:6)))
        return
      }"""
    with pytest.raises(ir.MLIRError) as raised:
        alpa.passes.run(parse(text), "simplify-trivial-ops")
    assert format_error(raised.value).startswith("f.py:3:4: error: @xla_python_cpu_callback is a")


def test_a_listener_gets_errors_notes_and_lines_of_passes() -> None:
    context = make_context()
    found: list[Diagnostic] = []
    with listening(context, found.append):
        location = ir.Location.file("f.py", 3, 4, context)
        location.emit_error("too large\nby far\nf.py:1:2: note: the other\nf.py:2:2: note: third")
    assert [str(each) for each in found] == [
        "f.py:3:4: error: too large\nby far",
        "f.py:1:2: note: the other",
        "f.py:2:2: note: third",
    ]


def test_text_that_is_not_utf8_does_not_end_the_process() -> None:
    context = make_context()
    found: list[Diagnostic] = []
    source = 'func.func @f() { func.call @"\\FE"() : () -> () return }'
    with listening(context, found.append), pytest.raises(ir.MLIRError):
        parse(source, context)
    assert [each.message for each in found] == ["the input holds text that is not UTF-8"]


SOURCE = [
    "// expected-error @+1 {{here}}",
    "op",
    "op // expected-remark {{same}}",
    "// expected-note @above {{before}}",
    "// expected-warning @below {{after}}",
    "op",
    "// expected-error-re @-1 {{took {{[0-9]+}} s (all)}}",
    "// expected-error @unknown {{nowhere}}",
]

FOUND = [
    Diagnostic("error", Place("f", 2, 1), "it is here"),
    Diagnostic("remark", Place("f", 3, 1), "same line"),
    Diagnostic("note", Place("f", 2, 1), "before this"),
    Diagnostic("warning", Place("f", 6, 1), "after"),
    Diagnostic("error", Place("f", 6, 1), "took 12 s (all)"),
    Diagnostic("error", Place("unknown"), "nowhere to be seen"),
]


def test_expected_diagnostics_are_found_in_any_order() -> None:
    assert mismatches(read_expected(SOURCE), FOUND[::-1], "f") == []


@pytest.mark.parametrize("missing", range(len(FOUND)))
def test_each_missing_diagnostic_is_an_error_at_its_comment(missing: int) -> None:
    found = FOUND[:missing] + FOUND[missing + 1 :]
    written = [1, 3, 4, 5, 7, 8][missing]
    (error,) = mismatches(read_expected(SOURCE), found, "f")
    assert error.place.line == written
    assert error.message.startswith(f"expected {FOUND[missing].severity} ")
    assert error.message.endswith("was not produced")


@pytest.mark.parametrize(
    "unexpected",
    [
        FOUND[0],  # each comment expects one
        Diagnostic("remark", Place("f", 2, 1), "it is here"),
        Diagnostic("error", Place("f", 3, 1), "it is here"),
        Diagnostic("error", Place("g", 2, 1), "it is here"),
        Diagnostic("error", Place("f", 6, 1), "took no s (all)"),
    ],
)
def test_unexpected_diagnostic_is_an_error_at_its_place(unexpected: Diagnostic) -> None:
    (error,) = mismatches(read_expected(SOURCE), [*FOUND, unexpected], "f")
    assert error.place == unexpected.place
    assert error.message == f"unexpected {unexpected.severity}: {unexpected.message}"


def test_malformed_expression_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"^2:1: error: malformed regular expression"):
        read_expected(["", "// expected-error-re {{a {{(}} b}}"])
