"""The text of a pipeline: MLIR's syntax, parsed with positions.

    pipeline := element (`,` element)*
    element  := name options? | anchor `(` pipeline `)`
    options  := `{` (key (`=` value)?)* `}`

A value runs to the next space or closing brace; quotes and brackets of any kind keep spaces and
braces inside it. One pair of quotes or braces around the whole value is taken off, as in MLIR. A
key alone means `true`. Which names exist is not known here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[^\s,(){}=]+")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_QUOTES = "\"'"


_DEEPEST = 100
"""Pipelines inside of each other; the reader recurses for each."""


class PipelineError(ValueError):
    """A pipeline's text is wrong, at a position of it; `str` shows the place."""

    def __init__(self, text: str, position: int, message: str, note: str = "") -> None:
        before = text[:position]
        self.text = text
        self.message = message
        self.note = note
        self.line = before.count("\n") + 1
        self.column = position - (before.rfind("\n") + 1) + 1
        lines = [
            f"pipeline:{self.line}:{self.column}: error: {message}",
            "  " + text.split("\n")[self.line - 1].replace("\t", " "),
            "  " + " " * (self.column - 1) + "^",
        ]
        super().__init__("\n".join(lines + ([f"note: {note}"] if note else [])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """`key=value` with the positions of both in the pipeline's text."""

    key: str
    value: str
    position: int
    value_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """A pass with its options, or an anchor op with the pipeline that runs on it.

    `nested` is None for a pass. `source` is the element as it was written.
    """

    name: str
    position: int
    source: str
    options: tuple[Option, ...] = ()
    nested: tuple[Element, ...] | None = None


def parse(text: str) -> tuple[Element, ...]:
    """The elements of a pipeline; an outermost `builtin.module(...)` or `any(...)` is taken off.

    Raises:
        PipelineError: the text does not follow the syntax.
    """
    reader = _Reader(text)
    elements = reader.elements(closing="")
    if len(elements) == 1 and elements[0].name in ("builtin.module", "any"):
        return elements if elements[0].nested is None else elements[0].nested
    return elements


def element_text(name: str, options: Mapping[str, object]) -> str:
    """The text of one pass with its options, quoted where their values need it.

    Raises:
        ValueError: a value holds both kinds of quotes, which the syntax cannot say.
    """
    words = [
        f"{key.replace('_', '-')}={_quoted(_value_text(value))}" for key, value in options.items()
    ]
    return f"{name}{{{' '.join(words)}}}" if words else name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the known names, or nothing if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: str) -> str:
    if re.fullmatch(r"[^\s(){}\[\]\"']+", value):
        return value
    for quote in _QUOTES:
        if quote not in value:
            return f"{quote}{value}{quote}"
    raise ValueError(f"an option's value cannot hold both kinds of quotes: {value}")


class _Reader:
    """A recursive-descent parser; `_at` is the position of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def elements(self, closing: str) -> tuple[Element, ...]:
        """The elements up to `closing` (the end of the text if empty), which is consumed."""
        opened = self._at - 1
        elements: list[Element] = []
        if self._take(closing):
            return ()
        while True:
            elements.append(self._element())
            if self._take(closing):
                return tuple(elements)
            if not self._take(","):
                if closing and self._at == len(self._text):
                    raise self._error(f"'(' is never closed by '{closing}'", opened)
                expected = f"',' or '{closing}'" if closing else "','"
                raise self._error(f"expected {expected} after '{elements[-1].name}'")

    def _element(self) -> Element:
        self._skip_space()
        start = self._at
        name = self._name("the name of a pass")
        options: tuple[Option, ...] = ()
        nested: tuple[Element, ...] | None = None
        if self._take("("):
            if self._depth == _DEEPEST:
                raise self._error(f"pipelines are nested more than {_DEEPEST} deep", self._at - 1)
            self._depth += 1
            nested = self.elements(closing=")")
            self._depth -= 1
        elif self._take("{"):
            options = self._options(self._at - 1)
        return Element(
            name=name,
            position=start,
            source=self._text[start : self._at],
            options=options,
            nested=nested,
        )

    def _options(self, opened: int) -> tuple[Option, ...]:
        options: dict[str, Option] = {}
        while not self._take("}"):
            if self._at == len(self._text):
                raise self._error("'{' is never closed by '}'", opened)
            position = self._at
            key = self._name("the name of an option")
            if key in options:
                raise self._error(f"option '{key}' is given twice", position)
            value, value_position = "true", position
            if self._text.startswith("=", self._at):
                self._at += 1
                value_position = self._at
                value = self._value(opened)
            options[key] = Option(
                key=key, value=value, position=position, value_position=value_position
            )
        return tuple(options.values())

    def _value(self, opened: int) -> str:
        """An option's value, without one pair of quotes or braces around the whole of it."""
        start = self._at
        closers: list[str] = []
        end_of_first: int | None = None
        """where the first character, and what it opens, ends"""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in _QUOTES:
                end = self._text.find(char, self._at + 1)
                if end < 0:
                    raise self._error(f"the quote {char} is never closed")
                self._at = end
            elif char in _CLOSING:
                closers.append(_CLOSING[char])
            elif closers and char == closers[-1]:
                closers.pop()
            elif not closers and (char == "}" or char.isspace()):
                is_whole = end_of_first == self._at - 1 and self._text[start] in "{" + _QUOTES
                return self._text[start + is_whole : self._at - is_whole]
            if end_of_first is None and not closers:
                end_of_first = self._at
            self._at += 1
        if closers:
            raise self._error(f"'{closers[-1]}' is missing in the value", start)
        raise self._error("'{' is never closed by '}'", opened)

    def _name(self, what: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            found = self._text[self._at : self._at + 1]
            raise self._error(f"expected {what}, found " + (f"'{found}'" if found else "the end"))
        self._at = match.end()
        return match.group()

    def _take(self, token: str) -> bool:
        """Consumes the token (the end of the text if empty) if it comes next."""
        self._skip_space()
        if not token:
            return self._at == len(self._text)
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _skip_space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _error(self, message: str, position: int | None = None) -> PipelineError:
        return PipelineError(self._text, self._at if position is None else position, message)
