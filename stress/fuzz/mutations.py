"""Breaks texts and bytes: drops a word, makes a number huge, inserts a piece of another text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from stress.fuzz import values

_TOKEN = re.compile(r"[%@#!^]?[\w.$-]+|\"[^\"\n]*\"|\S|\s+")
_NUMBERS = ("0", "-1", "1", "2", "7", "4294967296", "9223372036854775807", "99999999999999999999")
_ODD = ("\0", "\u2028", "\\", '"', "{", "}", "<", ">", "dense<[]>", "?", "x", "nan", "\r", "é")
_DEEP = 20_000


def mutate(text: str, others: Sequence[str], generator: random.Random, *, most: int = 4) -> str:
    """Breaks a text in one to `most` places; `others` are texts to take pieces from."""
    for _ in range(generator.randint(1, most)):
        text = generator.choice(_MUTATIONS)(text, others, generator)
    return text


_Mutation = Callable[[str, Sequence[str], random.Random], str]


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def _drop(text: str, others: Sequence[str], generator: random.Random) -> str:
    tokens = _tokens(text)
    begin = generator.randrange(len(tokens) + 1)
    return "".join(tokens[:begin] + tokens[begin + generator.randint(1, 8) :])


def _repeat(text: str, others: Sequence[str], generator: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    begin = generator.randrange(len(lines))
    some = lines[begin : begin + generator.randint(1, 5)]
    where = generator.randrange(len(lines) + 1)
    return "".join(lines[:where] + some * generator.randint(1, 3) + lines[where:])


def _swap(text: str, others: Sequence[str], generator: random.Random) -> str:
    parts = text.splitlines(keepends=True) if generator.random() < 0.5 else _tokens(text)
    if len(parts) > 1:
        a, b = generator.sample(range(len(parts)), 2)
        parts[a], parts[b] = parts[b], parts[a]
    return "".join(parts)


def _number(text: str, others: Sequence[str], generator: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    match = generator.choice(found)
    return text[: match.start()] + generator.choice(_NUMBERS) + text[match.end() :]


def _replace(text: str, others: Sequence[str], generator: random.Random) -> str:
    tokens = _tokens(text)
    if not tokens:
        return text
    other = _tokens(generator.choice(others))
    tokens[generator.randrange(len(tokens))] = generator.choice(other or ["x"])
    return "".join(tokens)


def _rename(text: str, others: Sequence[str], generator: random.Random) -> str:
    """Renames all occurrences of a word: an op, a value, an attribute, a type."""
    words = sorted(set(re.findall(r"[%@]?[A-Za-z_][\w.]*", text)))
    if len(words) < 2:
        return text
    old, new = generator.sample(words, 2)
    return text.replace(old, new)


def _insert(text: str, others: Sequence[str], generator: random.Random) -> str:
    where = generator.randrange(len(text) + 1)
    return text[:where] + generator.choice(_ODD) + text[where:]


def _cut(text: str, others: Sequence[str], generator: random.Random) -> str:
    return text[: generator.randrange(len(text) + 1)]


def _splice(text: str, others: Sequence[str], generator: random.Random) -> str:
    other = generator.choice(others)
    begin = generator.randrange(len(other) + 1)
    where = generator.randrange(len(text) + 1)
    return text[:where] + other[begin : begin + generator.randint(1, 400)] + text[where:]


def _nest(text: str, others: Sequence[str], generator: random.Random) -> str:
    """Nests brackets, which overflow the stack of recursive readers."""
    where = [match.start() for match in re.finditer(r"[\[({<]", text)]
    if generator.random() < 0.9 or not where:
        return _swap(text, others, generator)
    at = generator.choice(where)
    return text[:at] + text[at] * _DEEP + text[at:]


_MUTATIONS: tuple[_Mutation, ...] = (
    _drop,
    _repeat,
    _swap,
    _number,
    _number,
    _replace,
    _replace,
    _rename,
    _insert,
    _cut,
    _splice,
    _nest,
)


def mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    """Changes one to six bytes, and may cut off the end."""
    broken = bytearray(data)
    for _ in range(generator.randint(1, 6)):
        broken[generator.randrange(4, len(data))] = generator.randrange(256)
    return bytes(
        broken[: generator.randrange(4, len(data))] if generator.random() < 0.1 else broken
    )


def add_attributes(text: str, generator: random.Random) -> str:
    """Gives arguments, results and ops of MLIR text attributes, and arguments other types."""
    for _ in range(generator.randint(1, 3)):
        arguments = list(re.finditer(r"(%\w+): ([\w<>!.?*]+)(?: \{([^{}]*)\})?", text))
        dictionaries = list(re.finditer(r"\{(\w[\w.]* = [^{}]*)\}", text))
        if arguments and generator.random() < 0.6:
            match = generator.choice(arguments)
            name, type_, old = match.groups()
            if generator.random() < 0.2:
                type_ = generator.choice(values.TYPES)
            both = ", ".join(filter(None, (old, values.attribute(generator))))
            text = f"{text[: match.start()]}{name}: {type_} {{{both}}}{text[match.end() :]}"
        elif dictionaries:
            match = generator.choice(dictionaries)
            new = f"{{{match[1]}, {values.attribute(generator)}}}"
            text = text[: match.start()] + new + text[match.end() :]
    return text


def mutate_attribute(text: str, generator: random.Random) -> str:
    """Changes a number or a string of an `alpa.` attribute in MLIR text."""
    inside = [
        match
        for attribute in re.finditer(
            r"alpa\.\w+ = (?:\[.*?\]\}?|\{[^{}]*\}|[^,})\n]*)", text, re.DOTALL
        )
        for match in re.compile(r"\d+|\"[^\"]*\"").finditer(text, *attribute.span())
    ]
    if not inside:
        return text
    match = generator.choice(inside)
    new = generator.choice((*_NUMBERS, generator.choice(inside).group(), '"x"', '""'))
    return text[: match.start()] + new + text[match.end() :]
