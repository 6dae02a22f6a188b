"""Donation as XLA's modules write it: one attribute of the module, `mhlo.input_output_alias`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from alpa.dialects.bindings import ir

ALIASES = "mhlo.input_output_alias"


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A result that takes the place of an argument, each as a path into tuples."""

    argument: tuple[int, ...]
    """begins with the argument's number"""
    result: tuple[int, ...]
    """does not begin with a number where @main has one result, which may be a tuple"""
    kind: ir.Attribute | None
    """`"may_alias"` or `"must_alias"`"""

    @classmethod
    def read(cls, attribute: ir.Attribute) -> Iterator[Alias]:
        """The entries of the attribute.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        for alias in ir.ArrayAttr(attribute):
            entry = ir.DictAttr(alias)
            source = ir.DictAttr(entry["alias"])
            number = ir.IntegerAttr(source["parameter_number"]).value
            yield cls(
                argument=(number, *_path(source["parameter_index"])),
                result=_path(entry["output_index"]),
                kind=source["kind"] if "kind" in source else None,  # noqa: SIM401 - get makes attributes
            )

    def to_attr(self, context: ir.Context) -> ir.Attribute:
        """The entry as an attribute."""
        number, *inside = self.argument
        kind = "" if self.kind is None else f"kind = {self.kind}, "
        text = (
            f"{{alias = {{{kind}parameter_index = {_text(inside)}, "
            f"parameter_number = {number} : i64}}, output_index = {_text(self.result)}}}"
        )
        return ir.Attribute.parse(text, context)


def _path(attribute: ir.Attribute) -> tuple[int, ...]:
    return tuple(cast("Sequence[int]", ir.DenseI64ArrayAttr(attribute)))


def _text(path: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, path))}>" if path else "array<i64>"
