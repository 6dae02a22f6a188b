"""Typed access to the `alpa.*` attributes: what the upstream dialects have no word for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self, TypeVar, get_args

from alpa.dialects.bindings import func, ir, stablehlo

Role = Literal["batch", "state", "key", "constant"]
Part = Literal["forward", "backward", "update"]
ResultKind = Literal["concat", "mean", "sum", "last", "state"]
Schedule = Literal["gpipe", "1f1b"]
AccumulateDtype = Literal["f32", "f64", "same"]

FOLLOW = "alpa.follow"
FLOPS = "alpa.flops"
PART = "alpa.part"
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
ALIASING_OUTPUT = "tf.aliasing_output"
BUFFER_DONOR = "jax.buffer_donor"

WHOLE = "alpa.whole"
MICRO_BATCHES = "alpa.micro_batches"
_FLOAT = re.compile(r"b?f(\d+)")
"""A floating-point type and its bits: bf16, f32, f8E4M3FN."""

LAYER_BOUNDARY = "alpa.layer_boundary"
GRADIENT = "alpa.gradient"
RANDOM = "alpa.random"


def marker_of(op: ir.OpView) -> str | None:
    """Which of the front end's markers an op is: LAYER_BOUNDARY, GRADIENT, or none."""
    if not isinstance(op, stablehlo.CustomCallOp):
        return None
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    return target if target in (LAYER_BOUNDARY, GRADIENT) else None


EXACT = "exact"
WITH_NOISE = "exact, random numbers per micro-batch"
INDEPENDENT = "independent"


def micro_batches_of(module: ir.Module) -> str | None:
    """What is known of a module's micro-batches: `EXACT`, `WITH_NOISE`, `INDEPENDENT`, or
    nothing, where `combine-micro-batches` has not run."""
    said = module.operation.attributes.get(MICRO_BATCHES)
    return said.value if isinstance(said, ir.StringAttr) else None


def is_exact(said: str | None) -> bool:
    """Whether micro-batches are proven to give what the whole batch gives."""
    return said in (EXACT, WITH_NOISE)


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


def entries(attr: ir.DictAttr) -> dict[str, ir.Attribute]:
    """What a dictionary attribute holds; raises ValueError where jaxlib has no class for it."""
    names = [named.name for named in attr]
    try:
        # `attr` of an entry would end the process where this raises.
        return {name: attr[name] for name in names}
    except TypeError as error:
        raise ValueError(str(error)) from error


class _Fields:
    """The entries of a dictionary attribute; what is missing or of another kind is a ValueError."""

    def __init__(self, name: str, attr: ir.Attribute) -> None:
        self._name = name
        self._entries = entries(typed(name, attr, ir.DictAttr))

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def string(self, key: str) -> str:
        return self._get(key, ir.StringAttr).value

    def integer(self, key: str) -> int:
        return self._get(key, ir.IntegerAttr).value

    def number(self, key: str) -> float:
        return self._get(key, ir.FloatAttr).value

    def number_or_none(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def list_or_empty(self, key: str) -> Sequence[ir.Attribute]:
        return list(self._get(key, ir.ArrayAttr)) if key in self else []

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(self._get(key, ir.DenseI64ArrayAttr))

    def _get(self, key: str, kind: type[_Kind]) -> _Kind:
        return typed(f"{key} of {self._name}", self._entries.get(key), kind)


def i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def f64(value: float) -> ir.FloatAttr:
    return ir.FloatAttr.get(ir.F64Type.get(), value, ir.Location.unknown())


@dataclass(frozen=True)
class ResultRole:
    """`alpa.result`: how a result of a step is made from those of the micro-batches.

    `index` is the dimension of "concat" and the argument number of "state".
    """

    kind: ResultKind
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResultRole:
        """Raises ValueError for anything but concat:<dim>, mean, sum, last and state:<arg>."""
        kind, colon, index = text.partition(":")
        if kind in ("mean", "sum", "last") and not colon:
            return cls(kind)
        if kind in ("concat", "state") and index.isdigit():
            return cls(kind, int(index))
        raise ValueError(
            f'{RESULT} is "{text}"; expected concat:<dim>, mean, sum, last or state:<argument>'
        )

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class Slice:
    """`alpa.slice`: rows `start` to `stop` of dimension `dim` of what the given program has."""

    dim: int
    start: int
    stop: int

    def to_attr(self) -> ir.Attribute:
        return ir.DenseI64ArrayAttr.get([self.dim, self.start, self.stop])

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """Raises ValueError for anything but `array<i64: dim, start, stop>`."""
        if not isinstance(attr, ir.DenseI64ArrayAttr) or len(attr) != 3:
            raise ValueError(f"{SLICE} is {attr}; expected array<i64: dimension, start, stop>")
        return cls(*attr)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of @main. `input` is its number in the program that was given, `slice` the rows
    of that argument that it holds, where it is not all of it."""

    role: Role | None = None
    batch_dim: int | None = None
    input: int | None = None
    slice: Slice | None = None
    aliasing_output: int | None = None
    donor: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """One result of @main. `output` is its number in the program that was given, `slice` the rows
    of that result that it holds, where it is not all of it.

    A role `state:<n>` counts arguments as `alpa.input` does; among the parts of a state the one
    with this slice is meant.
    """

    role: ResultRole | None = None
    output: int | None = None
    slice: Slice | None = None

    @property
    def state(self) -> State | None:
        """The state that this is the new value of."""
        if self.role is None or self.role.kind != "state" or self.role.index is None:
            return None
        return (self.role.index, self.slice)


State = tuple[int, Slice | None]
"""A state, or the part of one that a slice takes: its number in the given program, and that."""


def input_number(position: int, argument: Argument) -> int:
    """An argument's number in the program that was given."""
    return position if argument.input is None else argument.input


def output_number(position: int, result: Result) -> int:
    """A result's number in the program that was given."""
    return position if result.output is None else result.output


def argument_state(position: int, argument: Argument) -> State:
    """The state that an argument holds, if it holds one."""
    return (input_number(position, argument), argument.slice)


def state_pairs(arguments: Sequence[Argument], results: Sequence[Result]) -> dict[int, int]:
    """Position of each new state -> position of the argument that holds the old one, its first
    copy."""
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
    return list(_read_arguments(attr))


# A pipeline asks again and again, and a large model has thousands of arguments. The key holds the
# context, so that no attribute outlives it.
@lru_cache(maxsize=8)
def _read_arguments(signature: ir.Attribute) -> tuple[Argument, ...]:
    arguments: list[Argument] = []
    for attrs in _dictionaries(signature):
        role = _string(attrs, ROLE)
        arguments.append(
            Argument(
                role=None if role is None else _one_of(ROLE, role, get_args(Role)),
                batch_dim=_int(attrs, BATCH_DIM),
                input=_int(attrs, INPUT),
                slice=_slice(attrs),
                aliasing_output=_int(attrs, ALIASING_OUTPUT),
                donor=BUFFER_DONOR in attrs,
            )
        )
    return tuple(arguments)


def read_results(function: func.FuncOp) -> list[Result]:
    """The results' attributes. Raises ValueError for an unknown role."""
    attr = function.attributes.get("res_attrs")
    if attr is None:
        return [Result() for _ in function.type.results]
    return list(_read_results(attr))


# As for arguments.
@lru_cache(maxsize=8)
def _read_results(signature: ir.Attribute) -> tuple[Result, ...]:
    results: list[Result] = []
    for attrs in _dictionaries(signature):
        text = _string(attrs, RESULT)
        role = None if text is None else ResultRole.parse(text)
        results.append(Result(role=role, output=_int(attrs, OUTPUT), slice=_slice(attrs)))
    return tuple(results)


def argument_attrs(
    argument: Argument, others: dict[str, ir.Attribute] | None = None
) -> ir.DictAttr:
    """The attribute dictionary of an argument, together with `others`."""
    i32 = ir.IntegerType.get_signless(32)
    attrs = dict(others or {})
    if argument.role is not None:
        attrs[ROLE] = ir.StringAttr.get(argument.role)
    if argument.batch_dim is not None:
        attrs[BATCH_DIM] = i64(argument.batch_dim)
    if argument.input is not None:
        attrs[INPUT] = i64(argument.input)
    if argument.slice is not None:
        attrs[SLICE] = argument.slice.to_attr()
    if argument.aliasing_output is not None:
        attrs[ALIASING_OUTPUT] = ir.IntegerAttr.get(i32, argument.aliasing_output)
    if argument.donor:
        attrs[BUFFER_DONOR] = ir.BoolAttr.get(True)
    return ir.DictAttr.get(attrs)


def result_attrs(result: Result, others: dict[str, ir.Attribute] | None = None) -> ir.DictAttr:
    """The attribute dictionary of a result, together with `others`."""
    attrs = dict(others or {})
    if result.role is not None:
        attrs[RESULT] = ir.StringAttr.get(str(result.role))
    if result.output is not None:
        attrs[OUTPUT] = i64(result.output)
    if result.slice is not None:
        attrs[SLICE] = result.slice.to_attr()
    return ir.DictAttr.get(attrs)


def write_interface(
    function: func.FuncOp, arguments: Sequence[Argument], results: Sequence[Result]
) -> None:
    """Writes roles and numbers of arguments and results; other attributes stay."""
    known = {ROLE, BATCH_DIM, INPUT, SLICE, ALIASING_OUTPUT, BUFFER_DONOR}
    old = signature_attrs(function, "arg_attrs", len(arguments))
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [argument_attrs(new, _without(o, known)) for new, o in zip(arguments, old, strict=True)]
    )
    old = signature_attrs(function, "res_attrs", len(results))
    function.attributes["res_attrs"] = ir.ArrayAttr.get(
        [
            result_attrs(new, _without(o, {RESULT, OUTPUT, SLICE}))
            for new, o in zip(results, old, strict=True)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class MeshAssignment:
    """One entry of `alpa.meshes`: the hosts and devices of a mesh and its logical shape.

    `devices` are numbers in the cluster, row-major over (host, device of the host).
    """

    name: str
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    logical_shape: tuple[int, ...]

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> MeshAssignment:
        """Raises ValueError where it is none."""
        fields = _Fields(MESHES, attr)
        return cls(
            name=fields.string("name"),
            hosts=fields.integers("hosts"),
            devices=fields.integers("devices"),
            logical_shape=fields.integers("logical_shape"),
        )

    def to_attr(self) -> ir.DictAttr:
        return ir.DictAttr.get(
            {
                "name": ir.StringAttr.get(self.name),
                "hosts": ir.DenseI64ArrayAttr.get(self.hosts),
                "devices": ir.DenseI64ArrayAttr.get(self.devices),
                "logical_shape": ir.DenseI64ArrayAttr.get(self.logical_shape),
            }
        )


def read_meshes(function: func.FuncOp) -> list[MeshAssignment]:
    """`alpa.meshes`; empty where the function has none. Raises ValueError for other things."""
    attr = function.attributes.get(MESHES)
    items = [] if attr is None else typed(MESHES, attr, ir.ArrayAttr)
    return [MeshAssignment.from_attr(item) for item in items]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What a search left out though it may have been possible, and why."""

    what: str
    reason: str

    def to_attr(self) -> ir.DictAttr:
        texts = {"what": self.what, "reason": self.reason}
        return ir.DictAttr.get({name: ir.StringAttr.get(text) for name, text in texts.items()})

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """Raises ValueError where it is none."""
        fields = _Fields(f"dropped of {PLAN}", attr)
        return cls(what=fields.string("what"), reason=fields.string("reason"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`alpa.plan`: micro-batches per step, the schedule, predicted seconds and bytes per mesh.

    `estimated_step_seconds` is T of the stages by the costs that they were cut by (`stage_dp.py`).
    No cut that the options admit has a smaller T than `estimated_step_bound`, for which each stage
    takes its compute alone, split as far as each op can be; transfers between stages are estimates
    in both. Where there was nothing to choose, the two are equal; the bound is 0 where the cut was
    not to have the least T. `accumulate_dtype` is the narrowest type of a
    sum over the micro-batches (`accumulator`).
    """

    num_micro_batches: int = 1
    schedule: Schedule = "gpipe"
    estimated_step_seconds: float = 0.0
    estimated_step_bound: float = 0.0
    predicted_step_seconds: float = 0.0
    predicted_peak_bytes: tuple[int, ...] = ()
    cluster: str = ""
    accumulate_dtype: AccumulateDtype = "f32"
    dropped: tuple[Dropped, ...] = ()

    def accumulator(self, dtype: str) -> str:
        """The element type in which values of an element type are added up over the micro-batches.

        Floating-point types narrower than `accumulate_dtype` become that type, complex ones by
        their parts; all others stay. With `same` every type stays.
        """
        if self.accumulate_dtype == "same":
            return dtype
        if dtype.startswith("complex<"):
            part = dtype.removeprefix("complex<").removesuffix(">")
            return f"complex<{self.accumulator(part)}>"
        bits = _FLOAT.match(dtype)
        is_narrow = bits is not None and int(bits[1]) < int(self.accumulate_dtype[1:])
        return self.accumulate_dtype if is_narrow else dtype

    def accumulator_type(self, type_: ir.RankedTensorType) -> ir.RankedTensorType:
        """The type of a tensor's sum over the micro-batches, by `accumulator`."""
        element = ir.Type.parse(self.accumulator(str(type_.element_type)), type_.context)
        return ir.RankedTensorType.get(type_.shape, element)

    @classmethod
    def read(cls, function: func.FuncOp) -> Self | None:
        """None where the function has none; raises ValueError where it is no plan."""
        attr = function.attributes.get(PLAN)
        if attr is None:
            return None
        fields = _Fields(PLAN, attr)
        return cls(
            num_micro_batches=fields.integer("num_micro_batches"),
            schedule=_one_of("the schedule", fields.string("schedule"), get_args(Schedule)),
            estimated_step_seconds=fields.number_or_none("estimated_step_seconds") or 0.0,
            estimated_step_bound=fields.number_or_none("estimated_step_bound") or 0.0,
            predicted_step_seconds=fields.number("predicted_step_seconds"),
            predicted_peak_bytes=fields.integers("predicted_peak_bytes"),
            cluster=fields.string("cluster") if "cluster" in fields else "",
            accumulate_dtype=_one_of(
                "accumulate_dtype",
                fields.string("accumulate_dtype") if "accumulate_dtype" in fields else "f32",
                get_args(AccumulateDtype),
            ),
            dropped=tuple(map(Dropped.from_attr, fields.list_or_empty("dropped"))),
        )

    def write(self, function: func.FuncOp) -> None:
        """Sets `alpa.plan`; an `accumulate_dtype` of f32 and an empty `dropped` are left out."""
        others: dict[str, ir.Attribute] = {}
        if self.accumulate_dtype != "f32":
            others["accumulate_dtype"] = ir.StringAttr.get(self.accumulate_dtype)
        if self.dropped:
            others["dropped"] = ir.ArrayAttr.get([one.to_attr() for one in self.dropped])
        function.attributes[PLAN] = ir.DictAttr.get(
            {
                **others,
                "num_micro_batches": i64(self.num_micro_batches),
                "schedule": ir.StringAttr.get(self.schedule),
                "estimated_step_seconds": f64(self.estimated_step_seconds),
                "estimated_step_bound": f64(self.estimated_step_bound),
                "predicted_step_seconds": f64(self.predicted_step_seconds),
                "predicted_peak_bytes": ir.DenseI64ArrayAttr.get(self.predicted_peak_bytes),
                "cluster": ir.StringAttr.get(self.cluster),
            }
        )


@dataclass(frozen=True, kw_only=True)
class SolverReport:
    """One entry of `alpa.solver`: what is proven about the shardings of a mesh.

    Seconds and bytes are per step and device. `status` is `optimal` (the objective equals the bound
    to 1e-6 of it), `within_gap` or `time_limit`. It, `bound` and `gap` are about the problem that
    was solved. If that is the `folded` one, in which equal layers have the same shardings, then a
    choice in which they differ may cost less than `bound`.
    """

    mesh: str
    intra: str
    status: str
    objective: float
    bound: float
    variables: int
    peak_bytes: int
    problem: str = "whole"
    """that was solved: `whole` or `folded`"""
    folded_objective: float | None = None
    """of the folded problem, where there are equal layers"""
    folded_bound: float | None = None
    """likewise"""

    @property
    def gap(self) -> float:
        return (self.objective - self.bound) / self.objective if self.objective else 0.0

    def to_attr(self) -> ir.Attribute:
        both = {"objective": self.folded_objective, "bound": self.folded_bound}
        folded = {f"folded_{name}": f64(it) for name, it in both.items() if it is not None}
        return ir.DictAttr.get(
            {
                **folded,
                "mesh": ir.StringAttr.get(self.mesh),
                "intra": ir.StringAttr.get(self.intra),
                "status": ir.StringAttr.get(self.status),
                "objective": f64(self.objective),
                "bound": f64(self.bound),
                "variables": i64(self.variables),
                "peak_bytes": i64(self.peak_bytes),
                "problem": ir.StringAttr.get(self.problem),
            }
        )

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Self:
        """Raises ValueError where it is none."""
        fields = _Fields(SOLVER, attr)
        return cls(
            mesh=fields.string("mesh"),
            intra=fields.string("intra"),
            status=fields.string("status"),
            objective=fields.number("objective"),
            bound=fields.number("bound"),
            variables=fields.integer("variables"),
            peak_bytes=fields.integer("peak_bytes"),
            problem=fields.string("problem") if "problem" in fields else "whole",
            folded_objective=fields.number_or_none("folded_objective"),
            folded_bound=fields.number_or_none("folded_bound"),
        )


def read_solver_reports(function: func.FuncOp) -> list[SolverReport]:
    """`alpa.solver` of @main, a report per mesh; none before shardings are found.

    Raises:
        ValueError: it is something else.
    """
    attr = function.attributes.get(SOLVER)
    items = [] if attr is None else typed(SOLVER, attr, ir.ArrayAttr)
    return [SolverReport.from_attr(item) for item in items]


def write_solver_reports(function: func.FuncOp, reports: Sequence[SolverReport]) -> None:
    function.attributes[SOLVER] = ir.ArrayAttr.get([report.to_attr() for report in reports])


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """`alpa.reshard` of a transfer: how it is done, bytes over links between and inside hosts."""

    method: str
    slow_bytes: int
    fast_bytes: int

    @classmethod
    def read(cls, op: ir.OpView) -> Self | None:
        """None where the transfer has none; raises ValueError where it is something else."""
        attr = op.attributes.get(RESHARD)
        if attr is None:
            return None
        fields = _Fields(RESHARD, attr)
        return cls(
            method=fields.string("method"),
            slow_bytes=fields.integer("slow_bytes"),
            fast_bytes=fields.integer("fast_bytes"),
        )

    def write(self, op: ir.OpView) -> None:
        op.attributes[RESHARD] = ir.DictAttr.get(
            {
                "method": ir.StringAttr.get(self.method),
                "slow_bytes": i64(self.slow_bytes),
                "fast_bytes": i64(self.fast_bytes),
            }
        )


def read_part(op: ir.OpView) -> Part | None:
    """`alpa.part` of a fragment; raises ValueError for an unknown one."""
    attr = op.attributes.get(PART)
    if attr is None:
        return None
    return _one_of(PART, typed(PART, attr, ir.StringAttr).value, get_args(Part))


def read_remat(op: ir.OpView) -> tuple[int, ...]:
    """`alpa.remat` of a fragment: the layers whose forward ops it computes again."""
    return read_ints(op, REMAT)


def read_int(op: ir.OpView | ir.Operation, name: str) -> int | None:
    """An integer attribute of an op, or None; raises ValueError where it is none."""
    attr = op.attributes.get(name)
    return None if attr is None else typed(name, attr, ir.IntegerAttr).value


def read_ints(op: ir.OpView | ir.Operation, name: str) -> tuple[int, ...]:
    """An `array<i64>` of an op, empty where it has none; raises ValueError for something else."""
    attr = op.attributes.get(name)
    return () if attr is None else tuple(typed(name, attr, ir.DenseI64ArrayAttr))


def read_float(op: ir.OpView | ir.Operation, name: str) -> float | None:
    """A float attribute of an op, or None; raises ValueError where it is none."""
    attr = op.attributes.get(name)
    return None if attr is None else typed(name, attr, ir.FloatAttr).value


def _one_of(name: str, text: str, allowed: tuple[Any, ...]) -> Any:
    """The allowed value that a text is; raises ValueError for any other text."""
    if text not in allowed:
        raise ValueError(f'{name} is "{text}"; expected one of {", ".join(allowed)}')
    return text


def take_from_signature(
    function: func.FuncOp, name: Literal["arg_attrs", "res_attrs"], key: str
) -> dict[int, ir.Attribute]:
    """Removes an attribute of arguments or results; gives what it was, by number."""
    signature = function.attributes.get(name)
    if signature is None:
        return {}
    given = [ir.DictAttr(attrs) for attrs in ir.ArrayAttr(signature)]
    found = {number: attrs[key] for number, attrs in enumerate(given) if key in attrs}
    if found:
        kept = [ir.DictAttr.get(_without(attrs, {key})) for attrs in _dictionaries(signature)]
        function.attributes[name] = ir.ArrayAttr.get(kept)
    return found


def signature_attrs(
    function: func.FuncOp, name: Literal["arg_attrs", "res_attrs"], count: int
) -> list[dict[str, ir.Attribute]]:
    """The attributes of each of `count` arguments or results."""
    attr = function.attributes.get(name)
    if attr is None:
        return [{} for _ in range(count)]
    return _dictionaries(attr)


def _dictionaries(signature: ir.Attribute) -> list[dict[str, ir.Attribute]]:
    return [entries(ir.DictAttr(d)) for d in ir.ArrayAttr(signature)]


def _without(attrs: dict[str, ir.Attribute], names: set[str]) -> dict[str, ir.Attribute]:
    return {name: attr for name, attr in attrs.items() if name not in names}


def _string(attrs: dict[str, ir.Attribute], name: str) -> str | None:
    return typed(name, attrs[name], ir.StringAttr).value if name in attrs else None


def _slice(attrs: dict[str, ir.Attribute]) -> Slice | None:
    return Slice.from_attr(attrs[SLICE]) if SLICE in attrs else None


def _int(attrs: dict[str, ir.Attribute], name: str) -> int | None:
    return typed(name, attrs[name], ir.IntegerAttr).value if name in attrs else None
