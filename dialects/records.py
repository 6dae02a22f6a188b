"""Frozen dataclasses as dictionary attributes, and checked access to other attributes.

A field is an entry of its name: a number, a text, one of a few texts (`Literal`), integers, or
something with `from_attr` and `to_attr`. A field made by `entry` may be missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin
from typing import get_type_hints as hints_of

from alpa.dialects.bindings import ir

Int32 = Annotated[int, 32]
"""An integer that is written as an `i32`; others are `i64`."""

_EXPECTED: dict[type[ir.Attribute], str] = {
    ir.StringAttr: "a string",
    ir.IntegerAttr: "an integer",
    ir.FloatAttr: "a floating-point number",
    ir.DenseI64ArrayAttr: "array<i64: ...>",
    ir.ArrayAttr: "a list",
    ir.DictAttr: "a dictionary",
    ir.FlatSymbolRefAttr: "a symbol",
}

_Kind = TypeVar("_Kind", bound=ir.Attribute)


def typed(name: str, attr: ir.Attribute | None, kind: type[_Kind]) -> _Kind:
    """An attribute of the kind that it has to be; ValueError where it is another, or none."""
    if attr is None:
        raise ValueError(f"there is no {name}; expected {_EXPECTED[kind]}")
    if not isinstance(attr, kind):
        raise ValueError(f"{name} is {attr}; expected {_EXPECTED[kind]}")
    return attr


def one_of(name: str, text: str, allowed: tuple[Any, ...]) -> Any:
    """The allowed value that a text is; raises ValueError for any other text."""
    if text not in allowed:
        raise ValueError(f'{name} is "{text}"; expected one of {", ".join(allowed)}')
    return text


def entries(attr: ir.DictAttr) -> dict[str, ir.Attribute]:
    """What a dictionary attribute holds; raises ValueError where jaxlib has no class for it."""
    names = [named.name for named in attr]
    try:
        # `attr` of an entry would end the process where this raises.
        return {name: attr[name] for name in names}
    except TypeError as error:
        raise ValueError(str(error)) from error


def i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def f64(value: float) -> ir.FloatAttr:
    return ir.FloatAttr.get(ir.F64Type.get(), value, ir.Location.unknown())


def entry(default: Any, *, name: str = "", always: bool = False) -> Any:
    """A field whose entry may be missing.

    Args:
        default: what a missing entry means.
        name: of the entry, if it is not that of the field.
        always: whether the default is written, too.
    """
    return dataclasses.field(default=default, metadata={"name": name, "always": always})


class Record:
    """A dataclass that is a dictionary attribute in the IR. `NAME` is the attribute's."""

    NAME: ClassVar[str]

    @classmethod
    def read(cls, op: ir.OpView) -> Self | None:
        """That of an op, or None; raises ValueError where it is something else."""
        attr = op.attributes.get(cls.NAME)
        return None if attr is None else cls.from_attr(attr)

    @classmethod
    def read_list(cls, op: ir.OpView) -> list[Self]:
        """Those in a list attribute of an op, which may be missing; raises ValueError."""
        attr = op.attributes.get(cls.NAME)
        items = [] if attr is None else typed(cls.NAME, attr, ir.ArrayAttr)
        return [cls.from_attr(item) for item in items]

    def write(self, op: ir.OpView) -> None:
        """Sets it on an op."""
        op.attributes[self.NAME] = self.to_attr()

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """Raises ValueError for an invalid record: an entry is missing, or of another kind."""
        given = entries(typed(cls.NAME, attr, ir.DictAttr))
        return cls.from_entries(given, f" of {cls.NAME}")

    @classmethod
    def from_entries(cls, given: Mapping[str, ir.Attribute], where: str = "") -> Self:
        """As `from_attr`; other entries do not matter. `where` follows a name in an error."""
        values: dict[str, Any] = {}
        for field in _fields(cls):
            if field.name in given or field.is_required:
                found = typed(f"{field.name}{where}", given.get(field.name), field.codec.kind)
                values[field.of] = field.codec.read(found)
        return cls(**values)

    def to_attr(self, others: Mapping[str, ir.Attribute] | None = None) -> ir.DictAttr:
        """Builds the attribute in the current context, with entries of `others` beside its own."""
        found = dict(others or {})
        for field in _fields(type(self)):
            value = getattr(self, field.of)
            found.pop(field.name, None)
            if value is not None and value != field.left_out:
                found[field.name] = field.codec.write(value)
        return ir.DictAttr.get(found)


@dataclasses.dataclass(frozen=True)
class _Codec:
    """How a type's values are read of a kind of attribute, and written."""

    kind: type[ir.Attribute]
    read: Callable[[Any], Any]
    write: Callable[[Any], ir.Attribute]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Field:
    of: str
    """the name of the dataclass's field"""
    name: str
    codec: _Codec
    is_required: bool
    left_out: Any
    """the value that is not written; None is never"""


_PLAIN: dict[Any, _Codec] = {
    str: _Codec(ir.StringAttr, lambda attr: attr.value, ir.StringAttr.get),
    int: _Codec(ir.IntegerAttr, lambda attr: attr.value, i64),
    Int32: _Codec(
        ir.IntegerAttr,
        lambda attr: attr.value,
        lambda value: ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value),
    ),
    float: _Codec(ir.FloatAttr, lambda attr: attr.value, f64),
    bool: _Codec(ir.Attribute, lambda _: True, ir.BoolAttr.get),  # true where it is there
    tuple[int, ...]: _Codec(ir.DenseI64ArrayAttr, tuple, ir.DenseI64ArrayAttr.get),
}


@cache
def _fields(kind: type[Record]) -> tuple[_Field, ...]:
    hints = hints_of(kind, include_extras=True)
    found: list[_Field] = []
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        name = field.metadata.get("name") or field.name
        leaves_out = field.metadata.get("always") is False
        found.append(
            _Field(
                of=field.name,
                name=name,
                codec=_codec(name, hints[field.name]),
                is_required=not field.metadata,
                left_out=field.default if leaves_out else None,
            )
        )
    return tuple(found)


def _codec(name: str, hint: Any) -> _Codec:
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if hint in _PLAIN:
        return _PLAIN[hint]
    of, items = get_origin(hint), get_args(hint)
    if of is Literal:
        return _Codec(
            ir.StringAttr, lambda attr: one_of(name, attr.value, items), ir.StringAttr.get
        )
    if of is tuple:
        return _Codec(
            ir.ArrayAttr,
            lambda attr: tuple(map(items[0].from_attr, attr)),
            lambda values: ir.ArrayAttr.get([value.to_attr() for value in values]),
        )
    return _Codec(ir.Attribute, hint.from_attr, lambda value: value.to_attr())
