"""Reads Alpa's JSON schemas, and checks that they describe what they allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

UNITS = ("s", "byte", "byte/s", "FLOP", "FLOP/s", "count", "share", "number", "share or byte")
"""Of a number, or of all numbers in an array; points have two in brackets."""


def read_schema(package: str, name: str) -> Any:
    """The schema of a package, checked against the specification of schemas."""
    schema = json.loads(resources.files(package).joinpath(name).read_text())
    Draft202012Validator.check_schema(schema)
    return schema


def undescribed(schema: Any, path: str = "") -> Iterator[str]:
    """The places of entries without a description, and of numbers without a unit."""
    for group in ("properties", "$defs"):
        for name, entry in schema.get(group, {}).items():
            here = f"{path}/{name}"
            if not entry.get("description"):
                yield f"{here}: description"
            if _has_numbers(entry) and not _is_unit(entry.get("unit", "")):
                yield f"{here}: unit"
            yield from undescribed(entry, here)
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            yield from undescribed(schema[part], f"{path}/{part}")


def _has_numbers(entry: Any) -> bool:
    """Whether it is a number, or holds numbers that have no unit of their own."""
    kinds = entry.get("type", [])
    if {"number", "integer"} & {*([kinds] if isinstance(kinds, str) else kinds)}:
        return True
    inner = [entry.get("items"), entry.get("additionalProperties")]
    inner += [*entry.get("anyOf", []), *entry.get("prefixItems", [])]
    return any(isinstance(it, dict) and "unit" not in it and _has_numbers(it) for it in inner)


def _is_unit(text: str) -> bool:
    return all(part in UNITS for part in text.strip("[]").split(", "))
