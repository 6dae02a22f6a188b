"""Diagnostics that a test expects, in comments, as `mlir-opt --verify-diagnostics` reads them.

    // expected-error @+1 {{part of the message}}
    // expected-error-re @below {{part {{[0-9]+}} of it}}

Kinds: error, warning, remark, note. Places: none (this line), `@+N`, `@-N`, `@above` and `@below`
(the nearest line without such a comment), `@unknown`. Each expects one diagnostic.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import cast

from alpa.passes.pipelines.diagnostics import Diagnostic, Place, Severity

_EXPECTED = re.compile(
    r"expected-(error|warning|remark|note)(-re)? *(?:@([+-]\d+|above|below|unknown))? *"
    r"\{\{(.*)\}\}\s*$"
)
_PATTERN = re.compile(r"\{\{(.*?)\}\}")


@dataclasses.dataclass(frozen=True)
class Expected:
    """A diagnostic that shall come at a line (None: at an unknown place), written at `written`."""

    severity: Severity
    line: int | None
    pattern: re.Pattern[str]
    text: str
    written: int

    def matches(self, found: Diagnostic, file: str) -> bool:
        if self.severity != found.severity or not self.pattern.search(found.message):
            return False
        if self.line is None:
            return not found.place.line
        return (found.place.file, found.place.line) == (file, self.line)


def read_expected(lines: Sequence[str]) -> list[Expected]:
    """The expectations in the lines of a source.

    Raises:
        ValueError: a regular expression in one is malformed; the message begins with its line.
    """
    matches = [_EXPECTED.search(line) for line in lines]
    expected: list[Expected] = []
    for at, match in enumerate(matches):
        if match is not None:
            severity, regular, place, text = match.groups()
            target = _target(matches, at, place)
            expected.append(
                Expected(
                    severity=cast(Severity, severity),
                    line=None if target is None else target + 1,
                    pattern=_pattern(text, regular is not None, at + 1),
                    text=text,
                    written=at + 1,
                )
            )
    return expected


def mismatches(
    expected: Sequence[Expected], found: Sequence[Diagnostic], file: str
) -> list[Diagnostic]:
    """An error for each diagnostic that was not expected, and each expected one that is missing."""
    missing = list(expected)
    errors: list[Diagnostic] = []
    for diagnostic in found:
        met = next((each for each in missing if each.matches(diagnostic, file)), None)
        if met is not None:
            missing.remove(met)
        else:
            message = f"unexpected {diagnostic.severity}: {diagnostic.message}"
            errors.append(Diagnostic("error", diagnostic.place, message))
    for each in missing:
        message = f'expected {each.severity} "{each.text}" was not produced'
        errors.append(Diagnostic("error", Place(file, each.written, 1), message))
    return errors


def _target(matches: Sequence[re.Match[str] | None], at: int, place: str | None) -> int | None:
    """The index of the line that an expectation in line `at` means; None for `@unknown`."""
    if place == "unknown":
        return None
    if place in ("above", "below"):
        step = 1 if place == "below" else -1
        at += step
        while 0 <= at < len(matches) and matches[at] is not None:
            at += step
        return at
    return at + int(place or 0)


def _pattern(text: str, regular: bool, line: int) -> re.Pattern[str]:
    """The pattern of a message: plain text, with `{{...}}` regular expressions if `regular`."""
    if not regular:
        return re.compile(re.escape(text))
    parts = _PATTERN.split(text)
    pattern = "".join(part if at % 2 else re.escape(part) for at, part in enumerate(parts))
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{line}:1: error: malformed regular expression: {error}") from error
