"""Typed access to the `alpa.*` attributes, which hold what upstream dialects cannot express."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar, get_args

from alpa.dialects.bindings import func, ir, stablehlo
from alpa.dialects.caches import cached
from alpa.dialects.records import Int32, Record, entries, entry, one_of, typed

Role = Literal["batch", "state", "key", "constant"]
Part = Literal["forward", "backward", "update"]
_PARTS = get_args(Part)
BackwardHalf = Literal["input", "weight"]
_HALVES = get_args(BackwardHalf)
ResultKind = Literal["concat", "mean", "sum", "last", "state"]
Signature = Literal["arg_attrs", "res_attrs"]

FOLLOW = "alpa.follow"
COST = "alpa.cost"
FLOPS = "alpa.flops"
PART = "alpa.part"
BACKWARD = "alpa.backward"
"""Which part of a split backward a fragment is (`split-backward`)."""
SECONDS = "alpa.seconds"
COMPUTE_SECONDS = "alpa.compute_seconds"
REMAT = "alpa.remat"
RESHARD = "alpa.reshard"
MESHES = "alpa.meshes"
PLAN = "alpa.plan"
PROGRAM = "alpa.program"
SOLVER = "alpa.solver"
ROLE = "alpa.role"
BATCH_DIM = "alpa.batch_dim"
INPUT = "alpa.input"
RESULT = "alpa.result"
OUTPUT = "alpa.output"
SLICE = "alpa.slice"
HELD = "alpa.held"
FORCED = "alpa.forced"
FORCED_RESULT = "alpa.forced_result"
ALIASING_OUTPUT = "tf.aliasing_output"
BUFFER_DONOR = "jax.buffer_donor"

WHOLE = "alpa.whole"
MICRO_BATCHES = "alpa.micro_batches"

LAYER_BOUNDARY = "alpa.layer_boundary"
GRADIENT = "alpa.gradient"
RANDOM = "alpa.random"
SHARED = -2
"""The dimension of random numbers that all samples share, and that a micro-batch's key draws."""


def marker_of(op: ir.OpView) -> str | None:
    """Which front-end marker an op is: LAYER_BOUNDARY, GRADIENT, or None."""
    target = call_target(op)
    return target if target in (LAYER_BOUNDARY, GRADIENT) else None


def call_target(op: ir.OpView) -> str | None:
    """The target of a custom call; None for any other op."""
    if not isinstance(op, stablehlo.CustomCallOp):
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


EXACT = "exact"
IF_MEANS = " if sums over samples are parts of means"
IF_SUMS = " if sums over samples are parts of sums"
WITH_NOISE = ", random numbers per micro-batch"
INDEPENDENT = "independent"


def micro_batches_of(module: ir.Module) -> str | None:
    """The state of a module's micro-batches; None before `combine-micro-batches`.

    `INDEPENDENT`, or `EXACT` with what the proof assumes (`IF_MEANS`, `IF_SUMS`) and what differs
    (`WITH_NOISE`).
    """
    said = module.operation.attributes.get(MICRO_BATCHES)
    return said.value if isinstance(said, ir.StringAttr) else None


def is_exact(said: str | None) -> bool:
    """Whether micro-batches are proven to compute what the whole batch computes."""
    return said is not None and said.startswith(EXACT)


@dataclass(frozen=True)
class ResultRole:
    """`alpa.result`: how the results of the micro-batches are combined.

    `index` is the dimension of "concat" and the argument number of "state".
    """

    kind: ResultKind
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses concat:<dim>, mean, sum, last or state:<arg>. Raises ValueError for other text."""
        kind, colon, index = text.partition(":")
        if kind in ("mean", "sum", "last") and not colon:
            return cls(kind)
        if kind in ("concat", "state") and index.isdigit():
            return cls(kind, int(index))
        raise ValueError(
            f'{RESULT} is "{text}"; expected concat:<dim>, mean, sum, last or state:<argument>'
        )

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """As `parse`, from `alpa.result`."""
        return cls.parse(typed(RESULT, attr, ir.StringAttr).value)

    def to_attr(self) -> ir.Attribute:
        return ir.StringAttr.get(str(self))

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class Slice:
    """`alpa.slice`: rows `start` to `stop` of dimension `dim` of a value of the input program."""

    dim: int
    start: int
    stop: int

    def to_attr(self) -> ir.Attribute:
        return ir.DenseI64ArrayAttr.get([self.dim, self.start, self.stop])

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """Raises ValueError unless it is `array<i64: dim, start, stop>`."""
        if not isinstance(attr, ir.DenseI64ArrayAttr) or len(attr) != 3:
            raise ValueError(f"{SLICE} is {attr}; expected array<i64: dimension, start, stop>")
        return cls(*attr)


@dataclass(frozen=True, kw_only=True)
class CallCost(Record):
    """`alpa.cost` of a custom call: what one execution computes and moves, before it is sharded.

    Raises:
        ValueError: a number is negative or not finite.
    """

    NAME = COST

    flops: float
    """floating point operations"""
    bytes: float | None = entry(None)
    """read from memory and written to it; None: its operands and results"""

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bytes", self.bytes)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} of {COST} is {value}; expected a finite number, at least 0"
                )


@dataclass(frozen=True, kw_only=True)
class Argument(Record):
    """One argument of @main. `input` is its number in the input program. If it holds only a part of
    that argument, `slice` gives the rows."""

    role: Role | None = entry(None, name=ROLE)
    batch_dim: int | None = entry(None, name=BATCH_DIM)
    input: int | None = entry(None, name=INPUT)
    slice: Slice | None = entry(None, name=SLICE)
    aliasing_output: Int32 | None = entry(None, name=ALIASING_OUTPUT)
    donor: bool = entry(False, name=BUFFER_DONOR)


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """One result of @main. `output` is its number in the input program. If it holds only a part of
    that result, `slice` gives the rows.

    A role `state:<n>` counts arguments as `alpa.input` does. For a state in parts, it means the
    part with this slice.
    """

    role: ResultRole | None = entry(None, name=RESULT)
    output: int | None = entry(None, name=OUTPUT)
    slice: Slice | None = entry(None, name=SLICE)

    @property
    def state(self) -> State | None:
        """The state whose new value this is."""
        if self.role is None or self.role.kind != "state" or self.role.index is None:
            return None
        return (self.role.index, self.slice)


State = tuple[int, Slice | None]
"""A state, or a part of one: its number in the input program, and the slice."""


def input_number(position: int, argument: Argument) -> int:
    """An argument's number in the input program."""
    return position if argument.input is None else argument.input


def output_number(position: int, result: Result) -> int:
    """A result's number in the input program."""
    return position if result.output is None else result.output


def argument_state(position: int, argument: Argument) -> State:
    """The state that an argument holds, if it holds one."""
    return (input_number(position, argument), argument.slice)


def state_pairs(arguments: Sequence[Argument], results: Sequence[Result]) -> dict[int, int]:
    """Maps the position of each new state to the position of the argument with the old one (its
    first copy)."""
    positions: dict[State, int] = {}
    for position, argument in enumerate(arguments):
        positions.setdefault(argument_state(position, argument), position)
    return {
        r: positions[result.state]
        for r, result in enumerate(results)
        if result.state is not None and result.state in positions
    }


def read_arguments(function: func.FuncOp) -> list[Argument]:
    """The arguments' attributes. Raises ValueError for an unknown role."""
    attr = function.attributes.get("arg_attrs")
    if attr is None:
        return [Argument() for _ in function.type.inputs]
    return list(_read_signature(Argument, attr))


def read_results(function: func.FuncOp) -> list[Result]:
    """The results' attributes. Raises ValueError for an unknown role."""
    attr = function.attributes.get("res_attrs")
    if attr is None:
        return [Result() for _ in function.type.results]
    return list(_read_signature(Result, attr))


_Kind = TypeVar("_Kind", Argument, Result)


# A pipeline asks again and again, and a large model has thousands of arguments.
@cached
def _read_signature(kind: type[_Kind], signature: ir.Attribute) -> tuple[_Kind, ...]:
    return tuple(map(kind.from_entries, _dictionaries(signature)))


def write_interface(
    function: func.FuncOp, arguments: Sequence[Argument], results: Sequence[Result]
) -> None:
    """Writes roles and numbers of arguments and results; other attributes stay."""
    both: tuple[tuple[Signature, Sequence[Record]], ...]
    both = (("arg_attrs", arguments), ("res_attrs", results))
    for name, interface in both:
        old = signature_attrs(function, name, len(interface))
        function.attributes[name] = ir.ArrayAttr.get(
            [new.to_attr(others) for new, others in zip(interface, old, strict=True)]
        )


def read_part(op: ir.OpView) -> Part | None:
    """`alpa.part` of a fragment; raises ValueError for an unknown one."""
    attr = op.attributes.get(PART)
    if attr is None:
        return None
    return one_of(PART, typed(PART, attr, ir.StringAttr).value, _PARTS)


def read_half(op: ir.OpView) -> BackwardHalf | None:
    """`alpa.backward` of a backward fragment; raises ValueError for an unknown one."""
    attr = op.attributes.get(BACKWARD)
    if attr is None:
        return None
    return one_of(BACKWARD, typed(BACKWARD, attr, ir.StringAttr).value, _HALVES)


def read_remat(op: ir.OpView) -> tuple[int, ...]:
    """`alpa.remat` of a fragment: the layers whose forward ops it computes again."""
    return read_ints(op, REMAT)


def read_int(op: ir.OpView | ir.Operation, name: str) -> int | None:
    """An integer attribute of an op, or None. Raises ValueError if it has another type."""
    attr = op.attributes.get(name)
    return None if attr is None else typed(name, attr, ir.IntegerAttr).value


def read_text(op: ir.OpView | ir.Operation, name: str) -> str | None:
    """A string attribute of an op, or None. Raises ValueError if it has another type."""
    attr = op.attributes.get(name)
    return None if attr is None else typed(name, attr, ir.StringAttr).value


def read_ints(op: ir.OpView | ir.Operation, name: str) -> tuple[int, ...]:
    """An `array<i64>` of an op, empty if it has none. Raises ValueError if it has another type."""
    attr = op.attributes.get(name)
    return () if attr is None else tuple(typed(name, attr, ir.DenseI64ArrayAttr))


def read_float(op: ir.OpView | ir.Operation, name: str) -> float | None:
    """A float attribute of an op, or None. Raises ValueError if it has another type."""
    attr = op.attributes.get(name)
    return None if attr is None else typed(name, attr, ir.FloatAttr).value


def take_from_signature(
    function: func.FuncOp, name: Signature, key: str
) -> dict[int, ir.Attribute]:
    """Removes an attribute of arguments or results; returns the old values, by number."""
    signature = function.attributes.get(name)
    if signature is None:
        return {}
    given = [ir.DictAttr(attrs) for attrs in ir.ArrayAttr(signature)]
    found = {number: attrs[key] for number, attrs in enumerate(given) if key in attrs}
    if found:
        kept = [dict(attrs) for attrs in _dictionaries(signature)]
        for number in found:
            del kept[number][key]
        function.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(attrs) for attrs in kept])
    return found


def signature_attrs(
    function: func.FuncOp, name: Signature, count: int
) -> list[dict[str, ir.Attribute]]:
    """The attributes of each of `count` arguments or results, which the caller may change."""
    attr = function.attributes.get(name)
    if attr is None:
        return [{} for _ in range(count)]
    return [dict(attrs) for attrs in _dictionaries(attr)]


@cached
def _dictionaries(signature: ir.Attribute) -> tuple[dict[str, ir.Attribute], ...]:
    return tuple(entries(ir.DictAttr(d)) for d in ir.ArrayAttr(signature))
