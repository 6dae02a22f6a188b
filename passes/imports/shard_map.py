"""`shard_map` in GSPMD's form, as `sdy.manual_computation`.

GSPMD has no op for it: `@SPMDFullToShardShape` makes each device's part of an array, ops compute on
parts, and `@SPMDShardToFullShape` takes parts for an array again. An `@Sharding` call before the
first, and an attribute of the second, say which part is on which device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from alpa.dialects import body, func, ir, sdy
from alpa.dialects.attributes import call_target, read_int, read_text
from alpa.dialects.sharding import Mesh, Sharding
from alpa.dialects.symbols import named_meshes
from alpa.passes.analysis.graph import inner_ops, replace_op, replace_operands, used_values
from alpa.passes.analysis.op_kinds import SHARD_MAP_CALLS
from alpa.passes.base import PassError, errors_at
from alpa.passes.imports.tilings import Tiling, mesh_of, sharding_over
from alpa.passes.sharding.manual import local_type, manual_computation

_ENTRY, _EXIT = SHARD_MAP_CALLS
_SHARDING = "mhlo.sharding"
_MANUAL = "{manual}"
_PARTITIONS = "mhlo.num_partitions"


def import_shard_maps(module: ir.Module, ops: Iterable[ir.OpView]) -> None:
    """Writes each `shard_map` of a module for several devices as manual computations over one mesh,
    whose axes are as few as the shardings allow. Parts that are not connected are computations of
    their own. The custom calls of the module are among the ops.

    Raises:
        PassError: a call has no sharding that cuts an array into tiles, no mesh has all shardings,
            a `shard_map` is over some axes only, its ops read whole arrays, or an attribute is of
            another type.
    """
    calls = _calls(ops, _ENTRY, _EXIT)
    if not calls:
        return
    tilings = {op.results[0]: _tiling(op) for op in calls}
    counts = {it.num_devices for it in tilings.values() if it.num_devices is not None}
    with errors_at(module.operation):
        partitions = read_int(module.operation, _PARTITIONS)
    if partitions is not None:
        counts.add(partitions)
    if len(counts) > 1:
        found = " and ".join(map(str, sorted(counts)))
        raise PassError(calls[0], f"shard_map and {_PARTITIONS} are for {found} devices")
    num_devices = max(counts, default=1)
    if num_devices == 1:
        return  # The calls do nothing, and are removed like other annotations.
    try:
        mesh = mesh_of(tilings.values(), num_devices)
    except ValueError as error:
        message = f"the shardings of shard_map have no mesh in common: {error}"
        raise PassError(calls[0], message) from error
    name = _free_name(module)
    with ir.InsertionPoint.at_block_begin(module.body), ir.Location.unknown():
        sdy.MeshOp(name, mesh.to_attr())
    for block in dict.fromkeys(op.operation.block for op in calls):
        _Block(block=block, tilings=tilings, name=name, mesh=mesh).write()


def _calls(ops: Iterable[ir.OpView], *targets: str) -> list[ir.OpView]:
    return [op for op in ops if call_target(op) in targets]


def _free_name(module: ir.Module) -> str:
    taken = {*named_meshes(module)}
    taken |= {op.name.value for op in module.body.operations if isinstance(op, func.FuncOp)}
    number, name = 0, "mesh"
    while name in taken:
        number, name = number + 1, f"mesh_{number}"
    return name


def _tiling(op: ir.OpView) -> Tiling:
    """How the whole array of an entry or an exit is cut."""
    said = op
    if call_target(op) == _ENTRY:
        if _text(op) != _MANUAL:
            raise PassError(
                op,
                f"a shard_map over some axes of its mesh only ({_text(op)}), in GSPMD's form; "
                "export the program again with Shardy, jax's default partitioner",
            )
        owner = op.operands[0].owner
        said = op if isinstance(owner, ir.Block) else owner.opview
        if call_target(said) != "Sharding":
            raise PassError(
                op,
                f"@{_ENTRY} takes no result of an @Sharding call, which says what part of the "
                "array is on which device",
            )
    try:
        return Tiling.parse(_text(said))
    except ValueError as error:
        raise PassError(op, f"the sharding of an array of shard_map: {error}") from error


def _text(op: ir.OpView) -> str:
    with errors_at(op):
        return read_text(op, _SHARDING) or ""


@dataclass(kw_only=True, eq=False)
class _Region:
    """Ops that compute on parts and are connected, by number, with the calls around them."""

    ops: list[int] = field(default_factory=list[int])
    entries: list[int] = field(default_factory=list[int])
    exits: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True, eq=False)
class _Block:
    """A block with entries and exits. Its ops are numbered in their order."""

    block: ir.Block
    tilings: Mapping[ir.Value, Tiling]
    name: str
    mesh: Mesh
    ops: list[ir.OpView] = field(default_factory=list[ir.OpView])
    reads: list[list[ir.Value]] = field(default_factory=list[list[ir.Value]])
    """of each op, itself or in its regions, from outside of it"""
    made: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    """by which op"""

    def write(self) -> None:
        """Replaces the entries, the exits and what stands between them."""
        for op in _calls(self.block.operations, "Sharding"):
            if _text(op) == _MANUAL:
                replace_op(op, op.operands)
        self.ops = list(self.block.operations)
        self.reads = [_reads(op) for op in self.ops]
        self.made = {value: o for o, op in enumerate(self.ops) for value in op.results}
        for region in self._regions():
            self._write(region)
        # Only now: numbers are looked up by values, which must live.
        for op in _calls(self.block.operations, _EXIT):
            op.operation.erase()
        for op in _calls(self.block.operations, _ENTRY):
            sharding = op.operands[0].owner
            op.operation.erase()
            if not any(True for _ in sharding.results[0].uses):
                sharding.erase()
        _sort(self.block)

    def _regions(self) -> list[_Region]:
        """The regions, those without ops first."""
        targets = [call_target(op) for op in self.ops]
        region_of: dict[int, _Region] = {}
        alone: list[_Region] = []
        for o, reads in enumerate(self.reads):
            if targets[o] == _ENTRY:
                continue
            makers = [self.made[value] for value in reads if value in self.made]
            entries = [it for it in makers if targets[it] == _ENTRY]
            joined = list(dict.fromkeys(region_of[it] for it in makers if it in region_of))
            if targets[o] == _EXIT:
                if not joined:
                    alone.append(_Region())
                region = (joined or alone)[-1]
                region.entries += entries
                region.exits.append(o)
            elif entries or joined:
                region, *others = joined or [_Region()]
                region.ops.append(o)
                region.entries += entries
                region_of[o] = region
                for other in others:
                    region.ops += other.ops
                    region.entries += other.entries
                    region.exits += other.exits
                    region_of.update(dict.fromkeys(other.ops, region))
        return [*alone, *dict.fromkeys(region_of.values())]

    def _write(self, region: _Region) -> None:
        """Writes a region as a manual computation, behind the last of its ops."""
        entries, members = sorted(set(region.entries)), sorted(region.ops)
        exits = [self.ops[o] for o in region.exits]
        made = [self.made[it] for op in exits for it in op.operands if it in self.made]
        last = max([*entries, *members, *made], default=0)
        if last == len(self.ops) - 1:
            raise PassError(self.ops[last], f"a part of an array does not go through @{_EXIT}")
        first = self.ops[min([*members, *entries, *region.exits])]
        with ir.InsertionPoint(self.ops[-1]), first.location:
            manual = manual_computation(
                [self.ops[o].operands[0].owner.operands[0] for o in entries],
                [op.results[0].type for op in exits],
                [self._sharding(self.ops[o], self.ops[o].operands[0].type) for o in entries],
                [self._sharding(op, op.results[0].type) for op in exits],
                self._axes,
                self.mesh,
            )
        manual.operation.move_after(self.ops[last].operation)
        block = body(manual)
        inside = dict[ir.Value, ir.Value]()
        for o, argument in zip(entries, block.arguments, strict=True):
            _check_part(self.ops[o], self.ops[o].results[0].type, argument.type)
            inside[self.ops[o].results[0]] = argument
        for o in members:
            self._take_constants(o, inside, block)
            block.append(self.ops[o])
            replace_operands(self.ops[o], inside)
            inside.update((it, it) for it in self.ops[o].results)
        for o in region.exits:
            self._take_constants(o, inside, block)
        with ir.InsertionPoint(block), first.location:
            sdy.ReturnOp([inside[op.operands[0]] for op in exits])
        for op, whole in zip(exits, manual.results, strict=True):
            part = local_type(whole.type, self._sharding(op, whole.type), self._axes, self.mesh)
            _check_part(op, op.operands[0].type, part)
            op.results[0].replace_all_uses_with(whole)

    @property
    def _axes(self) -> list[str]:
        return [name for name, _ in self.mesh.axes]

    def _sharding(self, call: ir.OpView, whole: ir.Type) -> Sharding:
        tiling, rank = self.tilings[call.results[0]], ir.RankedTensorType(whole).rank
        if tiling.dims and len(tiling.dims) != rank:
            raise PassError(call, f"a sharding of {len(tiling.dims)} dimensions for {whole}")
        return sharding_over(tiling, rank, self.name, self.mesh)

    def _take_constants(self, o: int, inside: dict[ir.Value, ir.Value], block: ir.Block) -> None:
        """Clones what an op reads that comes from constants or the device's number alone."""
        for value in self.reads[o]:
            if value in inside:
                continue
            maker = self.made.get(value)
            if maker is None or call_target(self.ops[maker]) in (_ENTRY, _EXIT):
                raise PassError(
                    self.ops[o],
                    "an op of shard_map reads a whole array; in GSPMD's form, each array goes "
                    f"through @{_ENTRY}",
                )
            self._take_constants(maker, inside, block)
            clone = self.ops[maker].operation.clone(ip=ir.InsertionPoint(block)).opview
            replace_operands(clone, inside)
            inside.update(zip(self.ops[maker].results, clone.results, strict=True))


def _sort(block: ir.Block) -> None:
    """Puts each op behind those that it reads, and leaves the order as it is otherwise."""
    ops = list(block.operations)
    reads = [_reads(op) for op in ops]
    made: dict[ir.Value, int] = {value: o for o, op in enumerate(ops) for value in op.results}
    order = dict[int, None]()
    for o in range(len(ops)):
        stack = [o]
        while stack:
            top = stack[-1]
            missing = {made[it] for it in reads[top] if it in made} - order.keys()
            if not missing:
                order[stack.pop()] = None
                continue
            if not missing.isdisjoint(stack):
                raise PassError(
                    ops[top], "ops of a shard_map depend on whole arrays that it makes itself"
                )
            stack.append(max(missing))
    for o in order:
        block.append(ops[o])


def _check_part(op: ir.OpView, given: ir.Type, expected: ir.Type) -> None:
    if given != expected:
        raise PassError(op, f"the sharding makes parts of {expected}, and this one is {given}")


def _reads(op: ir.OpView) -> list[ir.Value]:
    own: set[ir.Value] = {value for inner in inner_ops(op) for value in inner.results}
    for each in (op, *inner_ops(op)):
        for region in each.regions:
            own.update(value for block in region.blocks for value in block.arguments)
    return [value for value in used_values(op) if value not in own]
