"""Writes each fragment as a module of its own that any XLA can compile.

XLA keeps `sdy.sharding` on function arguments and results and on `sdy.sharding_constraint`, and
drops it on every other op: here the planned layout of each op's result, and of each variable of a
loop, becomes a constraint. So does each layout on the way of a change that takes several
collectives (`sharding/reshard_steps.py`). What is planned as unreduced is computed and kept as
parts (`sharding/local_sums.py`). Sharded custom calls run on their shards
(`sharding/local_calls.py`).

Before::

    %g = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1> (%x) {alpa.part = "backward"}
        (%a: tensor<8x16xf32>) {
      %0 = stablehlo.dot_general %a, %a … {sdy.sharding = …[<@mesh_1, [{"axis0"}, {}]>]}
      mpmd.return %0 : tensor<16x16xf32>
    } : (…) -> …

After (with two or more micro-batches, where an update consumes `%g`)::

    %g = mpmd.fragment<…> (%x) {alpa.module = @mesh_1.layer_1.backward,
                                alpa.accumulators = array<i64: 0>, alpa.part = "backward"} …
    module @mesh_1.layer_1.backward {
      sdy.mesh @mesh_1 = <["axis0"=4]>
      func.func public @main(
          %a: tensor<8x16xf32> {sdy.sharding = …},
          %sum: tensor<16x16xf32> {sdy.sharding = …, tf.aliasing_output = 0 : i32})
          -> (tensor<16x16xf32> {sdy.sharding = …}) {
        %0 = stablehlo.dot_general %a, %a …
        %1 = sdy.sharding_constraint %0 <@mesh_1, [{"axis0"}, {}]>
        %2 = stablehlo.add %sum, %1
        return %2
      }
    }

`data.Fragment` says what the attributes on the fragments mean.

A sum has the type of the value that is added up: `stage-mesh-partition` has made gradients wide
where `accumulate-dtype` asks for it. The update scales the sum before it does anything else. In a
plan that was made otherwise a sum may be of a narrower type than that of `alpa.plan`: a remark says
so.

**Fails when** a sharding names another mesh, when a fragment is exported
already, or when the program cannot be run in micro-batches (see `plan/checks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alpa.dialects.attributes import ALIASING_OUTPUT
from alpa.dialects.bindings import (
    body,
    filled,
    func,
    ir,
    main_function,
    mpmd,
    sdy,
    stablehlo,
    walk,
)
from alpa.dialects.mpmd_types import MeshTensor, read_topology
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.plan import data
from alpa.passes.plan.annotated import logical_meshes
from alpa.passes.plan.data import Fragment, Program, Value
from alpa.passes.plan.reader import read_planned
from alpa.passes.sharding.constraints import closed, materialise
from alpa.passes.sharding.local_calls import run_calls_on_shards
from alpa.passes.sharding.local_sums import lower_sums
from alpa.passes.sharding.reshard_steps import write_steps

_SHARDING = "sdy.sharding"


def _aliases(program: Program, step: int) -> dict[int, int]:
    """Operand -> result of an update fragment that may take over its buffer.

    The operand is a state argument that nothing reads afterwards, the result its new state of the
    same type and sharding. "Afterwards" is in program order and, as all other parts run before the
    updates, also in every schedule.
    """
    fragment = program.steps[step]
    if not isinstance(fragment, Fragment) or fragment.part != "update":
        return {}
    later = {result.value for result in program.results}
    for other in program.steps[step + 1 :]:
        later.update(other.inputs if isinstance(other, Fragment) else (other.source,))
    aliases: dict[int, int] = {}
    for operand, old in enumerate(fragment.inputs):
        if fragment.inputs.count(old) != 1 or old in later or old in program.varying:
            continue
        for new in program.new_states.get(old, ()):
            if new in fragment.outputs and program.values[old] == program.values[new]:
                number = fragment.outputs.index(new)
                if number not in aliases.values():
                    aliases[operand] = number
                    break
    return aliases


@dataclass(frozen=True, kw_only=True)
class _Exporter:
    """What the export of every fragment of a module needs."""

    module: ir.Module
    program: Program
    meshes: dict[str, Mesh]
    links: dict[str, LogicalMesh]
    loss_scale: float

    def export(self, step: int, op: mpmd.FragmentOp, symbol: str) -> None:
        fragment = self.program.steps[step]
        assert isinstance(fragment, Fragment)
        if fragment.module is not None:
            raise PassError(op, f"the fragment is exported already, as @{fragment.module}")
        accumulated = tuple(i for i, v in enumerate(fragment.outputs) if v in self.program.totals)
        extra = tuple(i for i in accumulated if fragment.outputs[i] in self.program.micro_used)
        aliases = _aliases(self.program, step)
        values = self.program.values
        inputs = [values[v] for v in fragment.inputs]
        inputs += [values[fragment.outputs[i]] for i in accumulated]
        outputs = [values[v] for v in fragment.outputs]
        outputs += [values[fragment.outputs[i]] for i in extra]
        donors = {**aliases, **{len(fragment.inputs) + n: i for n, i in enumerate(accumulated)}}
        with op.location:
            function = self._function(op, symbol, fragment.mesh, inputs, outputs, donors)
            self._fill(op, function, fragment, accumulated, extra)
        run_calls_on_shards(function, self.meshes[fragment.mesh])
        for inner in list(walk(function.entry_block)):
            materialise(inner, fragment.mesh, self.meshes[fragment.mesh].size)
        write_steps(function, self.links[fragment.mesh])
        op.attributes[data.MODULE] = ir.FlatSymbolRefAttr.get(symbol)
        for name, numbers in (
            (data.ACCUMULATORS, accumulated),
            (data.EXTRA_RESULTS, extra),
            (data.DONATED, tuple(sorted(aliases))),
        ):
            if numbers:
                op.attributes[name] = ir.DenseI64ArrayAttr.get(numbers)

    def _function(
        self,
        op: mpmd.FragmentOp,
        symbol: str,
        mesh: str,
        inputs: list[Value],
        outputs: list[Value],
        donors: dict[int, int],
    ) -> func.FuncOp:
        """The nested module with its mesh and an empty @main of plain tensors."""
        nested = ir.Operation.create(
            "builtin.module",
            regions=1,
            attributes={"sym_name": ir.StringAttr.get(symbol)},
            ip=ir.InsertionPoint(self.module.body),
        )
        with ir.InsertionPoint(nested.regions[0].blocks.append()):
            sdy.MeshOp(mesh, self.meshes[mesh].to_attr())
            function = func.FuncOp(
                "main", ir.FunctionType.get([_type(v) for v in inputs], [_type(v) for v in outputs])
            )
        function.attributes["sym_visibility"] = ir.StringAttr.get("public")
        i32 = ir.IntegerType.get_signless(32)
        arguments = [{_SHARDING: _attr(op, value)} for value in inputs]
        for argument, result in donors.items():
            arguments[argument][ALIASING_OUTPUT] = ir.IntegerAttr.get(i32, result)
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
        function.attributes["res_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get({_SHARDING: _attr(op, value)}) for value in outputs]
        )
        return function

    def _fill(
        self,
        op: mpmd.FragmentOp,
        function: func.FuncOp,
        fragment: Fragment,
        accumulated: tuple[int, ...],
        extra: tuple[int, ...],
    ) -> None:
        """Moves a copy of the fragment's ops into the function and returns what it has to."""
        block = function.add_entry_block()
        copy = op.operation.clone(ip=ir.InsertionPoint(op))
        source = body(copy)
        known: dict[ir.Value, Sharding] = {}
        with ir.InsertionPoint(block):
            for value, outer, old, new in zip(
                fragment.inputs, op.operands, source.arguments, block.arguments, strict=False
            ):
                scaled = fragment.part == "update" and value in self.program.totals
                inner = self._scaled(op, new, value) if scaled else new
                old.replace_all_uses_with(inner)
                known[inner] = _planned(outer)
        operations = list(source.operations)
        for inner in operations[:-1]:
            block.append(inner)
        lower_sums(operations[:-1], known, self.meshes[fragment.mesh])
        single = list(operations[-1].operands)
        results = list(single)
        with ir.InsertionPoint(block):
            for n, i in enumerate(accumulated):
                results[i] = stablehlo.add(block.arguments[len(fragment.inputs) + n], single[i])
            func.ReturnOp([*results, *(single[i] for i in extra)])
        copy.erase()

    def _scaled(self, op: ir.OpView, total: ir.Value, number: int) -> ir.Value:
        """The mean of a gradient, or of a loss, that was added up, where it lies."""
        kind, value = (
            self.program.losses.get(self.program.sources[number]),
            self.program.values[number],
        )
        scales = {None: self.loss_scale, "mean": 1 / self.program.num_micro_batches, "sum": 1.0}
        if scales[kind] == 1.0 or not value.is_float:
            return total
        mean = stablehlo.multiply(total, filled(ir.RankedTensorType(total.type), scales[kind]))
        if self.meshes[value.mesh].size == 1 or not value.shape:
            return mean
        return sdy.ShardingConstraintOp(mean, sharding=_attr(op, value)).result


def _type(value: Value) -> ir.Type:
    return ir.Type.parse(f"tensor<{''.join(f'{size}x' for size in value.shape)}{value.dtype}>")


def _planned(value: ir.Value) -> Sharding:
    tensor = MeshTensor.from_type(value.type)
    return tensor.sharding or Sharding(tensor.mesh, ((),) * tensor.type.rank)


def _attr(op: ir.OpView, value: Value) -> ir.Attribute:
    sharding = value.sharding or Sharding(value.mesh, ((),) * len(value.shape))
    return closed(op, sharding, value.mesh).to_attr()


@dataclass(frozen=True, kw_only=True)
class ExportStages(Pass):
    """Writes each fragment as a module of its own that any XLA can compile."""

    name: ClassVar[str] = "export-stages"

    loss_reduction: Literal["mean", "sum"] = option(
        "mean",
        "whether updates see the `mean` or the `sum` of the micro-batches' gradients",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        with module.context:
            self._run(module, remark)

    def _run(self, module: ir.Module, remark: Remark) -> None:
        program = read_planned(module)
        main = main_function(module)
        mean = self.loss_reduction == "mean" and program.num_micro_batches > 1
        exporter = _Exporter(
            module=module,
            program=program,
            meshes=read_topology(main),
            links=logical_meshes(main),
            loss_scale=1 / program.num_micro_batches if mean else 1.0,
        )
        taken = {
            ir.StringAttr(op.attributes["sym_name"]).value
            for op in module.body.operations
            if "sym_name" in op.attributes
        }
        ops = list(main.entry_block.operations)
        for number, (step, op) in enumerate(zip(program.steps, ops, strict=False)):
            if isinstance(step, Fragment) and isinstance(op, mpmd.FragmentOp):
                symbol = _unique(step.name, taken)
                taken.add(symbol)
                exporter.export(number, op, symbol)
                narrow = _narrow_sum(program, step)
                if narrow is not None:
                    remark(op.location, narrow)


def _narrow_sum(program: Program, fragment: Fragment) -> str | None:
    """What to say of a fragment's sum whose type is narrower than the plan asks for."""
    for number, value in enumerate(fragment.outputs):
        dtype = program.values[value].dtype
        wide = program.plan.accumulator(dtype)
        if value in program.totals and program.parts[value] != "update" and wide != dtype:
            return (
                f"result {number} is added up in {dtype} over {program.num_micro_batches} "
                f"micro-batches; to add up in {wide}, plan the program anew by stage-mesh-partition"
            )
    return None


def _unique(name: str, taken: set[str]) -> str:
    candidate, n = name, 1
    while candidate in taken:
        n += 1
        candidate = f"{name}.{n}"
    return candidate
