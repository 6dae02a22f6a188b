"""Reads a planned `@main` as plain data (`data.py`), checked."""

from __future__ import annotations

from alpa.dialects.attributes import (
    COMPUTE_SECONDS,
    SECONDS,
    input_number,
    micro_batches_of,
    output_number,
    read_arguments,
    read_float,
    read_half,
    read_ints,
    read_part,
    read_remat,
    read_results,
)
from alpa.dialects.bindings import body, ir, main_function, mpmd, sdy, stablehlo, terminator
from alpa.dialects.checks import NOT_PLANNED
from alpa.dialects.mpmd_types import MeshTensor, Origin, mesh_of, read_topology, stage_of
from alpa.dialects.plan import Plan, Reshard, read_meshes
from alpa.dialects.records import typed
from alpa.dialects.sharding import Mesh
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.base import PassError, errors_at
from alpa.passes.plan.checks import check_program
from alpa.passes.plan.data import (
    ACCUMULATORS,
    DONATED,
    EXTRA_RESULTS,
    MODULE,
    READ_BY_UPDATE,
    DeviceMesh,
    Fragment,
    Program,
    ProgramArgument,
    ProgramResult,
    Transfer,
    Value,
)
from alpa.passes.plan.text import runs
from alpa.passes.sharding.sums import stored


def read_planned(module: ir.Module) -> Program:
    """The program of a planned module that `check_planned` accepts.

    Raises:
        PassError: the program is not planned, or the micro-batches cannot be run as the plan says.
    """
    with errors_at(module.operation):
        main = main_function(module)
        arguments, results = read_arguments(main), read_results(main)
        plan = Plan.read(main) or Plan()
        meshes, assigned = read_topology(main), read_meshes(main)
    if not meshes:
        raise PassError(main, NOT_PLANNED)
    for mesh in assigned:
        if mesh.name not in meshes:
            raise PassError(main, f"alpa.meshes names {mesh.name}, which the topology does not")
    reader = _Reader(meshes)
    entry = main.entry_block
    with errors_at(main):
        for argument in entry.arguments:
            reader.number(argument)
    ops = list(entry.operations)
    steps: list[Fragment | Transfer] = []
    for op in ops[:-1]:
        with errors_at(op):
            steps.append(reader.step(op))
    program = Program(
        values=tuple(reader.values),
        arguments=tuple(
            ProgramArgument(value=i, number=input_number(i, a), attributes=a)
            for i, a in enumerate(arguments)
        ),
        results=tuple(
            ProgramResult(value=reader.numbers[value], number=output_number(i, r), attributes=r)
            for i, (value, r) in enumerate(zip(ops[-1].operands, results, strict=True))
        ),
        steps=tuple(steps),
        meshes=tuple(
            DeviceMesh(
                name=m.name,
                hosts=m.hosts,
                devices=m.devices,
                axes=meshes[m.name].axes,
                device=m.device,
            )
            for m in assigned
        ),
        plan=plan,
        micro_batches=micro_batches_of(module),
    )
    check_program(program, ops[:-1], main)
    return program


class _Reader:
    """Numbers the values of @main in the order of their definition."""

    def __init__(self, meshes: dict[str, Mesh]) -> None:
        self.meshes = meshes
        self.numbers: dict[ir.Value, int] = {}
        self.values: list[Value] = []

    def number(self, value: ir.Value) -> int:
        """Raises ValueError for a value that is not on a mesh."""
        tensor = MeshTensor.from_type(value.type)
        shape, sharding = tuple(tensor.type.shape), tensor.sharding
        if sharding is not None and sharding.unreduced:
            shape, sharding = stored(shape, sharding, self.meshes[tensor.mesh])
        dtype = str(tensor.type.element_type)
        self.numbers[value] = len(self.values)
        self.values.append(Value(mesh=tensor.mesh, shape=shape, dtype=dtype, sharding=sharding))
        return self.numbers[value]

    def step(self, op: ir.OpView) -> Fragment | Transfer:
        """Raises ValueError for an attribute with an invalid value."""
        if isinstance(op, mpmd.TransferOp):
            reshard = Reshard.read(op)
            return Transfer(
                source=self.numbers[op.operands[0]],
                target=self.number(op.results[0]),
                seconds=read_float(op, SECONDS) or 0.0,
                **(vars(reshard) if reshard else {}),
            )
        if not isinstance(op, mpmd.FragmentOp):
            raise PassError(op, f"a planned @main holds fragments and transfers, not {op.name}")
        part = read_part(op)
        if part is None:
            raise PassError(op, 'the fragment needs alpa.part = "forward", "backward" or "update"')
        origins = tuple(Origin.from_attr(a) for a in ir.ArrayAttr(op.attributes["origin"]))
        symbol = op.attributes.get(MODULE)
        module = None if symbol is None else typed(MODULE, symbol, ir.FlatSymbolRefAttr).value
        mesh, half = mesh_of(op), read_half(op)
        outputs = tuple(self.number(value) for value in op.results)
        # `merge-fragments` names all parts; the layers of updates are those of the others.
        merged = {origin.part: None for origin in origins}
        parts = part if part not in merged else "_".join(merged)
        parts = parts if half is None else f"{parts}_{half}"
        named = tuple(it for it in origins if it.part == part or it.part != "update") or origins
        return Fragment(
            name=module or f"{mesh}.{origin_name(named)}.{parts}",
            mesh=mesh,
            part=part,
            inputs=tuple(self.numbers[value] for value in op.operands),
            outputs=outputs,
            origins=origins,
            seconds=read_float(op, SECONDS) or 0.0,
            compute_seconds=read_float(op, COMPUTE_SECONDS),
            remat=read_remat(op),
            module=module,
            accumulators=read_ints(op, ACCUMULATORS),
            extra_results=read_ints(op, EXTRA_RESULTS),
            donated=read_ints(op, DONATED),
            read_by_update=read_ints(op, READ_BY_UPDATE),
            half=half,
            stage=stage_of(op),
            wide=tuple((outputs[copy], outputs[number]) for copy, number in _wide_copies(op)),
        )


def _wide_copies(op: mpmd.FragmentOp) -> list[tuple[int, int]]:
    """(copy, result) for each of a fragment's results that copies another one into a wider type."""
    returned = [_unconstrained(value) for value in terminator(body(op)).operands]
    numbers: dict[ir.Value, list[int]] = {}
    for number, value in enumerate(returned):
        numbers.setdefault(value, []).append(number)
    found: list[tuple[int, int]] = []
    for copy, value in enumerate(returned):
        if isinstance(value.owner, stablehlo.ConvertOp):
            source = _unconstrained(value.owner.operands[0])
            if source in numbers and _is_wider(value.type, source.type):
                found += [(copy, number) for number in numbers[source]]
    return found


def _unconstrained(value: ir.Value) -> ir.Value:
    while isinstance(value.owner, sdy.ShardingConstraintOp):
        value = value.owner.operands[0]
    return value


def _is_wider(type_: ir.Type, other: ir.Type) -> bool:
    """Whether a float tensor holds the numbers of another one in more bits."""
    elements = [ir.RankedTensorType(it).element_type for it in (type_, other)]
    is_float = all(isinstance(it, ir.FloatType) for it in elements)
    return is_float and element_bytes(elements[0]) > element_bytes(elements[1])


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
        texts += [
            "_".join(map(str, dict.fromkeys((name, first, last))))
            for first, last in runs(sorted(found))
        ] or [name]
    return "_".join(texts) or "inferred"
