"""Writes a reshard that takes several collectives as one constraint for each of them.

XLA finds a reshard of one collective by itself. Any other it may solve by replicating the whole
tensor, unless it is told each sharding in between (`sharding/reshard_steps.py`).

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8x8xf32>, sharding=<@mesh_0, [{"a", "b"}, {}, {}]>>
    !y = !mpmd.mesh_tensor<"mesh_0", tensor<8x8x8xf32>, sharding=<@mesh_0, [{}, {"a"}, {"b"}]>>
    sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
    func.func public @main(%x: !x) -> !y attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8x8xf32>) {
        mpmd.return %a : tensor<8x8x8xf32>
      } : (!x) -> !y
      return %y : !y
    }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
      func.func public @main(
          %a: tensor<8x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a", "b"}, {}, {}]>})
          -> (tensor<8x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {"a"}, {"b"}]>}) {
        %0 = sdy.sharding_constraint %a <@mesh_0, [{}, {"a"}, {"b"}]> : tensor<8x8x8xf32>
        return %0 : tensor<8x8x8xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
    func.func public @main(…) -> … { … }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
      func.func public @main(
          %a: tensor<8x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a", "b"}, {}, {}]>})
          -> (tensor<8x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {"a"}, {"b"}]>}) {
        %1 = sdy.sharding_constraint %a <@mesh_0, [{"a"}, {}, {"b"}]> : tensor<8x8x8xf32>
        %0 = sdy.sharding_constraint %1 <@mesh_0, [{}, {"a"}, {"b"}]> : tensor<8x8x8xf32>
        return %0 : tensor<8x8x8xf32>
      }
    }

**Requires**: modules as `constrain-shardings` leaves them.

**Ensures**: a constraint on an argument, or on the result of another constraint, takes at most one
collective. The steps are those that `ilp-shard-annotate` counted (`ReshardTable.path`).

**Options**: none.

**Fails when** a constraint refers to an axis that the mesh lacks or to a part of an axis, the
plan's cluster is unknown, or a fragment has no module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import func, ir, main_function, sdy, walk
from alpa.dialects.sharding import Sharding, signature_shardings
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.base import Pass, Remark
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import ReshardTable
from alpa.passes.plan.annotated import logical_meshes
from alpa.passes.plan.fragment_modules import fragment_modules
from alpa.passes.sharding.layouts import layout_of
from alpa.passes.sharding.reshard_steps import exchanges


@dataclass(frozen=True, kw_only=True)
class WriteReshardSteps(Pass):
    """Writes a change of layout that takes several collectives as a constraint for each."""

    name: ClassVar[str] = "write-reshard-steps"

    def run(self, module: ir.Module, remark: Remark) -> None:
        links = logical_meshes(main_function(module))
        for nested in fragment_modules(module):
            write_steps(nested.function, links[nested.mesh_name])


def write_steps(function: func.FuncOp, mesh: LogicalMesh) -> None:
    """Writes each constraint that takes several collectives as one constraint for each of them."""
    tables: dict[int, ReshardTable] = {}
    arguments = signature_shardings(function, "arg_attrs")
    known = {function.arguments[number]: sharding for number, sharding in arguments.items()}
    for op in list(walk(function.entry_block)):
        if not isinstance(op, sdy.ShardingConstraintOp):
            continue
        source, target = known.get(op.operands[0]), Sharding.from_attr(op.attributes["sharding"])
        known[op.results[0]] = target
        type_ = ir.RankedTensorType(op.results[0].type)
        if source is None or not type_.rank:
            continue
        table = tables.setdefault(type_.rank, ReshardTable(mesh, type_.rank))
        before, after = (layout_of(op, sharding, mesh) for sharding in (source, target))
        itemsize = element_bytes(type_.element_type)
        with ir.InsertionPoint(op), op.location:
            for step in exchanges(table, before, after, tuple(type_.shape), itemsize):
                if step.layout == after:
                    break
                dims = tuple(tuple(mesh.axis_names[a] for a in axes) for axes in step.layout)
                attr = Sharding.of(target.mesh, dims).to_attr()
                op.operands[0] = sdy.ShardingConstraintOp(op.operands[0], sharding=attr).result
