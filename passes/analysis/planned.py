"""A planned `@main` as plain data, and what the micro-batches make of its values.

`read` turns the IR into frozen dataclasses that outlive it: the export pass and the runtime share
them, and with them one answer to each of these questions:

- **varying**: values that each micro-batch has a version of: batch arguments, arguments that the
  forward part carries from one micro-batch to the next, what forward and backward fragments
  produce, and transfers of those.
- **gradients**: what a backward fragment produces and an update fragment consumes, directly or
  through transfers. They are added up over the micro-batches where they are produced, and
  transferred once per step.
- **losses**: what a forward fragment produces, a result says it is the mean or the sum of, and an
  update fragment consumes, directly or through transfers. They are added up like gradients.
- **totals**: the values whose version in the update phase is that sum: gradients, losses and their
  transfers. What else varies and flows into an update is the last micro-batch's version, of a
  state that the forward part has carried on until then, or of what is the same in all of them.
- **micro_used**: values whose versions of the single micro-batches are needed. A gradient can be
  among them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from alpa.dialects.attributes import (
    SECONDS,
    Argument,
    Part,
    Plan,
    Reshard,
    Result,
    State,
    input_number,
    output_number,
    read_arguments,
    read_float,
    read_int,
    read_ints,
    read_meshes,
    read_part,
    read_results,
    typed,
)
from alpa.dialects.bindings import body, func, ir, main_function, mpmd
from alpa.dialects.mpmd_types import MeshTensor, Origin, read_topology
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.analysis.graph import Graph
from alpa.passes.base import PassError
from alpa.passes.sharding.local_sums import stored

MODULE = "alpa.module"
ACCUMULATORS = "alpa.accumulators"
EXTRA_RESULTS = "alpa.extra_results"
DONATED = "alpa.donated"

MOST_MICRO_BATCHES = 1 << 16
"""Each has instructions of its own; with more, a step would be ready to run after minutes only."""

_ORDER: dict[Part | None, int] = {None: 0, "forward": 1, "backward": 2, "update": 3}


@dataclass(frozen=True, kw_only=True)
class Value:
    """A global tensor on a mesh; no sharding means one copy per device.

    The parts of an unreduced value lie along an extra leading dimension (`local_sums.stored`).
    """

    mesh: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | None = None

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes that each dimension is split over."""
        return self.sharding.axis_names if self.sharding else ((),) * len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, as `graph.element_bytes` says of its type."""
        digits = re.search(r"\d+", self.dtype)
        if digits is None:
            raise ValueError(f"elements of type {self.dtype} have no size")
        size = max(1, int(digits[0]) // 8)
        return 2 * size if self.dtype.startswith("complex") else size

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("f", "bf", "complex"))


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A mesh: its axes, major first, and the cluster's numbers of its hosts and devices."""

    name: str
    hosts: tuple[int, ...]
    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One `mpmd.fragment`; inputs and outputs are numbers of values.

    Its module takes the inputs, then one donated accumulator for each result number in
    `accumulators`; it returns the outputs, the accumulated ones as sums, then this micro-batch's
    version of each result number in `extra_results`. `donated` are numbers of operands.
    """

    name: str
    mesh: str
    part: Part
    stage: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    seconds: float = 0.0
    """predicted, of one run"""
    module: str | None = None
    accumulators: tuple[int, ...] = ()
    extra_results: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One `mpmd.transfer` between two values."""

    source: int
    target: int
    method: str | None = None
    seconds: float = 0.0
    """predicted, each time"""


@dataclass(frozen=True, kw_only=True)
class ProgramArgument:
    """One argument of the planned @main. `number` is its number in the original program."""

    value: int
    number: int
    attributes: Argument


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """One result of the planned @main. `number` is its number in the original program."""

    value: int
    number: int
    attributes: Result

    @property
    def sum_kind(self) -> str | None:
        """`mean` or `sum` over the micro-batches, where it is one of the two."""
        role = self.attributes.role
        return role.kind if role is not None and role.kind in ("mean", "sum") else None


@dataclass(frozen=True, kw_only=True)
class Program:
    """A planned @main: numbered values, and fragments and transfers in program order."""

    values: tuple[Value, ...]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]
    steps: tuple[Fragment | Transfer, ...]
    meshes: tuple[DeviceMesh, ...]
    plan: Plan

    def axis_size(self, value: int, axis: str) -> int:
        """The size of an axis of a value's mesh."""
        return self._axes[self.values[value].mesh][axis]

    def local_bytes(self, value: int) -> int:
        """The bytes that one device of its mesh holds of a value, padding included."""
        it = self.values[value]
        parts = [
            -(-size // prod(self.axis_size(value, axis) for axis in axes))
            for size, axes in zip(it.shape, it.dims, strict=True)
        ]
        return prod(parts) * it.itemsize

    @cached_property
    def _axes(self) -> dict[str, dict[str, int]]:
        return {mesh.name: dict(mesh.axes) for mesh in self.meshes}

    @property
    def num_micro_batches(self) -> int:
        return self.plan.num_micro_batches

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        return tuple(step for step in self.steps if isinstance(step, Fragment))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(step for step in self.steps if isinstance(step, Transfer))

    @cached_property
    def parts(self) -> tuple[Part | None, ...]:
        """The part that produces each value, through transfers; None for arguments."""
        parts: list[Part | None] = [None] * len(self.values)
        for step in self.steps:
            if isinstance(step, Transfer):
                parts[step.target] = parts[step.source]
            else:
                for output in step.outputs:
                    parts[output] = step.part
        return tuple(parts)

    @cached_property
    def new_states(self) -> dict[int, tuple[int, ...]]:
        """Argument value -> the values that are its state after the step, one for each copy.

        Results say so by their role; those without one, by the argument's `tf.aliasing_output`.
        """
        by_role: dict[State, list[int]] = {}
        by_number: dict[int | None, list[int]] = {}
        for result in self.results:
            role = result.attributes.role
            if role is None:
                by_number.setdefault(result.number, []).append(result.value)
            elif result.attributes.state is not None:
                by_role.setdefault(result.attributes.state, []).append(result.value)
        return {
            argument.value: (
                *by_role.get((argument.number, argument.attributes.slice), ()),
                *by_number.get(argument.attributes.aliasing_output, ()),
            )
            for argument in self.arguments
        }

    @cached_property
    def carries(self) -> dict[int, int]:
        """Argument value -> the value that is its version in the next micro-batch.

        Those are the states that the forward part writes. A copy on the same mesh is preferred.
        """
        carries: dict[int, int] = {}
        for old, states in self.new_states.items():
            new = [value for value in states if self.parts[value] == "forward"]
            here = [value for value in new if self.values[value].mesh == self.values[old].mesh]
            if new:
                carries[old] = (here or new)[0]
        return carries

    @cached_property
    def varying(self) -> frozenset[int]:
        """Values with a version per micro-batch."""
        batches = (a.value for a in self.arguments if a.attributes.role == "batch")
        varying = {*batches, *self.carries}
        for step in self.steps:
            if isinstance(step, Transfer):
                varying |= {step.target} if step.source in varying else set()
            elif step.part != "update":
                varying.update(step.outputs)
        return frozenset(varying)

    @cached_property
    def _update_used(self) -> frozenset[int]:
        """Values that an update fragment consumes, directly or through transfers."""
        used: set[int] = set()
        for step in reversed(self.steps):
            if isinstance(step, Fragment):
                used.update(step.inputs if step.part == "update" else ())
            elif step.target in used:
                used.add(step.source)
        return frozenset(used)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """What backward fragments produce and updates consume."""
        produced = {v for f in self.fragments if f.part == "backward" for v in f.outputs}
        return frozenset(produced & self._update_used)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Of each value the one that it is a copy of, through transfers; most are their own."""
        sources = list(range(len(self.values)))
        for step in self.transfers:
            sources[step.target] = sources[step.source]
        return tuple(sources)

    @cached_property
    def losses(self) -> dict[int, str]:
        """What forward fragments produce, updates consume, and results are a mean or a sum of:
        which of the two."""
        kinds = {
            self.sources[result.value]: result.sum_kind
            for result in self.results
            if result.sum_kind is not None
        }
        produced = {v for f in self.fragments if f.part == "forward" for v in f.outputs}
        return {
            value: kinds[value]
            for value in sorted(produced & self._update_used & kinds.keys())
            if self.values[value].is_float
        }

    @cached_property
    def totals(self) -> frozenset[int]:
        """Gradients, losses and the transfers of them that reach an update; empty for one
        micro-batch."""
        if self.num_micro_batches == 1:
            return frozenset()
        totals = {*self.gradients, *self.losses}
        for step in self.transfers:
            if step.source in totals and step.target in self._update_used:
                totals.add(step.target)
        return frozenset(totals)

    @cached_property
    def micro_used(self) -> frozenset[int]:
        """Varying values whose versions of the single micro-batches are needed.

        A result that is a mean or a sum of a gradient is taken from the gradient's total.
        """
        used: set[int] = set(self.carries.values())
        for result in self.results:
            if result.sum_kind is None or result.value not in self.totals:
                used.add(result.value)
        for step in reversed(self.steps):
            if isinstance(step, Fragment):
                used.update(step.inputs if step.part != "update" else ())
            elif step.target in used:
                used.add(step.source)
        return frozenset(used) & self.varying


def read(module: ir.Module) -> Program:
    """The program of a planned module that `check_planned` accepts.

    Raises:
        PassError: the micro-batches cannot be run as the plan says.
    """
    try:
        main = main_function(module)
        arguments, results = read_arguments(main), read_results(main)
        plan = Plan.read(main) or Plan()
    except ValueError as error:
        raise PassError(module.operation, str(error)) from error
    meshes = read_topology(main)
    assigned = read_meshes(main)
    for mesh in assigned:
        if mesh.name not in meshes:
            raise PassError(main, f"alpa.meshes names {mesh.name}, which the topology does not")
    reader = _Reader(meshes)
    entry = main.entry_block
    for argument in entry.arguments:
        reader.number(argument, main)
    ops = list(entry.operations)
    steps = [reader.step(op) for op in ops[:-1]]
    program = Program(
        values=tuple(reader.values),
        arguments=tuple(
            ProgramArgument(value=i, number=input_number(i, a), attributes=a)
            for i, a in enumerate(arguments)
        ),
        results=tuple(
            ProgramResult(
                value=reader.numbers[value],
                number=output_number(i, r),
                attributes=r,
            )
            for i, (value, r) in enumerate(zip(ops[-1].operands, results, strict=True))
        ),
        steps=tuple(steps),
        meshes=tuple(
            DeviceMesh(name=m.name, hosts=m.hosts, devices=m.devices, axes=meshes[m.name].axes)
            for m in assigned
        ),
        plan=plan,
    )
    unsettled = _unsettled(program, ops)
    for step, op in zip(program.steps, ops, strict=False):
        _check_step(program, step, op, unsettled)
    _check_interface(program, main)
    return program


class _Reader:
    """Numbers the values of @main in the order of their definition."""

    def __init__(self, meshes: dict[str, Mesh]) -> None:
        self.meshes = meshes
        self.numbers: dict[ir.Value, int] = {}
        self.values: list[Value] = []

    def number(self, value: ir.Value, op: ir.OpView) -> int:
        try:
            tensor = MeshTensor.from_type(value.type)
        except ValueError as error:
            raise PassError(op, str(error)) from error
        shape, sharding = tuple(tensor.type.shape), tensor.sharding
        if sharding is not None and sharding.unreduced:
            shape, sharding = stored(shape, sharding, self.meshes[tensor.mesh])
        self.numbers[value] = len(self.values)
        self.values.append(
            Value(
                mesh=tensor.mesh,
                shape=shape,
                dtype=str(tensor.type.element_type),
                sharding=sharding,
            )
        )
        return self.numbers[value]

    def step(self, op: ir.OpView) -> Fragment | Transfer:
        try:
            return self._step(op)
        except ValueError as error:
            raise PassError(op, str(error)) from error

    def _step(self, op: ir.OpView) -> Fragment | Transfer:
        """Raises ValueError where an attribute is none that it can have."""
        if isinstance(op, mpmd.TransferOp):
            reshard = Reshard.read(op)
            return Transfer(
                source=self.numbers[op.operands[0]],
                target=self.number(op.results[0], op),
                method=reshard.method if reshard else None,
                seconds=read_float(op, SECONDS) or 0.0,
            )
        if not isinstance(op, mpmd.FragmentOp):
            raise PassError(op, f"a planned @main holds fragments and transfers, not {op.name}")
        part = read_part(op)
        if part is None:
            raise PassError(op, 'the fragment needs alpa.part = "forward", "backward" or "update"')
        origins = tuple(Origin.from_attr(a) for a in ir.ArrayAttr(op.attributes["origin"]))
        symbol = op.attributes.get(MODULE)
        module = None if symbol is None else typed(MODULE, symbol, ir.FlatSymbolRefAttr).value
        mesh = ir.StringAttr(op.attributes["mesh_name"]).value
        return Fragment(
            name=module or f"{mesh}.{origin_name(origins)}.{part}",
            mesh=mesh,
            part=part,
            stage=read_int(op, "stage_id"),
            inputs=tuple(self.numbers[value] for value in op.operands),
            outputs=tuple(self.number(value, op) for value in op.results),
            origins=origins,
            seconds=read_float(op, SECONDS) or 0.0,
            module=module,
            accumulators=read_ints(op, ACCUMULATORS),
            extra_results=read_ints(op, EXTRA_RESULTS),
            donated=read_ints(op, DONATED),
        )


def origin_name(origins: tuple[Origin, ...]) -> str:
    """layer_4, layer_3, layer_2 -> layer_2_4; runs that do not touch are joined by `_`."""
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(origin.name for origin in origins):
        prefix, _, digits = name.rpartition("_")
        if digits.isdigit():
            numbers.setdefault(prefix, []).append(int(digits))
        else:
            numbers[name] = []
    texts: list[str] = []
    for name, found in numbers.items():
        runs: list[list[int]] = []
        for number in sorted(found):
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        texts += ["_".join(map(str, dict.fromkeys((name, r[0], r[-1])))) for r in runs] or [name]
    return "_".join(texts) or "inferred"


def _unsettled(program: Program, ops: Sequence[ir.OpView]) -> frozenset[int]:
    """What updates read and is another one in each micro-batch: there is no one version of it.

    It is neither a total nor a state that the forward part has carried on, and made of the batch,
    or of such a state. Forward fragments make constants, too, and hand them on.
    """
    if program.num_micro_batches == 1:
        return frozenset()
    read = {v for f in program.fragments if f.part == "update" for v in f.inputs}
    carried = {program.sources[value] for value in program.carries.values()}
    found = {
        value
        for value in read & program.varying - program.totals
        if program.sources[value] not in carried
    }
    if not found:
        return frozenset()
    changing = {a.value for a in program.arguments} & program.varying
    for step, op in zip(program.steps, ops, strict=False):
        if isinstance(step, Transfer):
            changing |= {step.target} if step.source in changing else set()
        elif step.part != "update":
            graph = Graph.of(body(op))
            depends = graph.depends(n for n, v in enumerate(step.inputs) if v in changing)
            pairs = zip(step.outputs, graph.returned, strict=True)
            changing.update(value for value, inner in pairs if depends[inner])
    return frozenset(found & changing)


def _check_step(
    program: Program, step: Fragment | Transfer, op: ir.OpView, unsettled: frozenset[int]
) -> None:
    if isinstance(step, Transfer):
        return
    results, arguments = len(step.outputs), len(step.inputs) + len(step.accumulators)
    for name, numbers, count, what in (
        (ACCUMULATORS, step.accumulators, results, "results"),
        (EXTRA_RESULTS, step.extra_results, results, "results"),
        (DONATED, step.donated, arguments, "arguments"),
    ):
        if not all(0 <= number < count for number in numbers):
            raise PassError(op, f"{name} is {list(numbers)}; the fragment has {count} {what}")
    for number, value in enumerate(step.inputs):
        part = program.parts[value]
        if _ORDER[part] > _ORDER[step.part]:
            raise PassError(
                op,
                f"operand {number} of this {step.part} fragment is made by the {part} part; "
                "over the micro-batches every forward runs before its backward, "
                "and these before the update",
            )
        if step.part == "update" and value in unsettled:
            it = program.values[value]
            type_ = "x".join([*map(str, it.shape), it.dtype])
            raise PassError(
                op,
                f"operand {number} of this update fragment, a {type_}, "
                + ("an argument" if part is None else f"made by the {part} part")
                + f", is another one in each of the {program.num_micro_batches} micro-batches, "
                "and the update runs once, after all of them; return it as a result whose mean or "
                "sum is meant, which the update then reads, or plan with 1 micro-batch",
            )
    for number, value in enumerate(step.outputs):
        if value in program.totals and not program.values[value].is_float:
            raise PassError(
                op,
                f"result {number} of type {program.values[value].dtype} flows from a backward into "
                f"an update fragment and would be added up over {program.num_micro_batches} "
                "micro-batches, which is meant for floating-point gradients only; plan with 1 "
                "micro-batch",
            )


def _check_interface(program: Program, main: func.FuncOp) -> None:
    for what, one in (
        *((f"argument {i}", argument) for i, argument in enumerate(program.arguments)),
        *((f"result {i}", result) for i, result in enumerate(program.results)),
    ):
        shape, part = program.values[one.value].shape, one.attributes.slice
        if one.number < 0:
            raise PassError(main, f"{what} has the number {one.number} in the given program")
        if part is None:
            continue
        fits = 0 <= part.dim < len(shape) and part.start >= 0
        if not fits or part.stop - part.start != shape[part.dim]:
            raise PassError(
                main,
                f"{what} of shape {list(shape)} cannot be rows {part.start} to {part.stop} of "
                f"dimension {part.dim}",
            )
    numbers = {result.number for result in program.results}
    if numbers != set(range(len(numbers))):
        raise PassError(main, f"the results' alpa.output are {sorted(numbers)}: one is missing")
    batches = program.num_micro_batches
    if not 1 <= batches <= MOST_MICRO_BATCHES:
        raise PassError(
            main,
            f"alpa.plan has num_micro_batches = {batches}; it takes 1 to {MOST_MICRO_BATCHES:,}",
        )
    if batches == 1:
        return
    for i, argument in enumerate(program.arguments):
        dim, rank = argument.attributes.batch_dim, len(program.values[argument.value].shape)
        if argument.attributes.role == "batch" and (dim is None or not 0 <= dim < rank):
            raise PassError(
                main,
                f"argument {i} is a batch of {batches} micro-batches and needs alpa.batch_dim "
                f"below its rank of {rank}; it has {dim}",
            )
    for i, result in enumerate(program.results):
        if result.value in program.varying:
            _check_result(program, i, result, main)


def _check_result(program: Program, i: int, result: ProgramResult, main: func.FuncOp) -> None:
    role, value = result.attributes.role, program.values[result.value]
    batches, part = program.num_micro_batches, program.parts[result.value]
    if role is None:
        raise PassError(
            main,
            f"result {i} has {batches} versions, one per micro-batch, and no alpa.result that says "
            "how they become one: concat:<dim>, mean, sum, last or state:<argument>",
        )
    if role.kind == "concat" and not 0 <= (role.index or 0) < len(value.shape):
        raise PassError(main, f'result {i} of rank {len(value.shape)} has alpa.result = "{role}"')
    if result.sum_kind is not None and value.dtype == "i1":
        raise PassError(
            main,
            f"result {i} is boolean and has no {role} over the {batches} micro-batches; return a "
            "number in its place",
        )
    if role.kind == "state" and part == "backward":
        raise PassError(
            main,
            f"result {i} is the new state of argument {role.index} and comes from a backward "
            f"fragment; with {batches} micro-batches it has to come from a forward fragment, "
            "which carries it on, or from an update",
        )
