"""Copies each fragment into the function of a module of its own.

Arguments and results of the function have the types and shardings of the fragment's operands and
results. A value without a sharding is replicated.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {?}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"}
          (%a: tensor<8x4xf32>) {
        %0 = stablehlo.tanh %a {alpa.follow = 0 : i64,
            sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
        mpmd.return %0 : tensor<8x4xf32>
      } : (!x) -> !x
      return %y : !x
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @mesh_0.layer_0.forward, alpa.part = "forward"} …
    }
    module @mesh_0.layer_0.forward {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = stablehlo.tanh %a
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
        return %0 : tensor<8x4xf32>
      }
    }

**Requires**: a plan whose micro-batches can be run as it says (`plan/checks.py`).

**Ensures**: each fragment names its module by `alpa.module`. The module holds the fragment's mesh
and one public function. Functions that its custom calls compute with are private. Shardings in it
are closed, and its ops have no attributes of Alpa.

**Options**: none.

**Fails when** a fragment has a module already, a sharding is over another mesh than the
fragment's, a constant is elided, or the micro-batches cannot be run as the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from alpa.dialects import body, func, ir, main_function, mpmd, sdy, walk
from alpa.dialects.elided import elided_constants
from alpa.dialects.mpmd_types import MeshTensor, read_topology
from alpa.dialects.sharding import Mesh, Sharding, op_shardings, set_op_shardings
from alpa.dialects.symbols import computations
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.plan import data
from alpa.passes.plan.data import Fragment
from alpa.passes.plan.fragment_modules import SHARDING, FragmentModule
from alpa.passes.plan.reader import read_planned


@dataclass(frozen=True, kw_only=True)
class OutlineFragments(Pass):
    """Copies each fragment into the function of a module of its own."""

    name: ClassVar[str] = "outline-fragments"

    def run(self, module: ir.Module, remark: Remark) -> None:
        program = read_planned(module)
        main = main_function(module)
        meshes = read_topology(main)
        symbols = ir.SymbolTable(module.operation)
        for op in elided_constants(main):
            raise PassError(
                op,
                "this constant is elided: its values were left out when the program was printed, "
                "so no module can be compiled; print the program with all values, or make the "
                "constant an argument",
            )
        for step, op in zip(program.steps, list(main.entry_block.operations), strict=False):
            if not isinstance(step, Fragment) or not isinstance(op, mpmd.FragmentOp):
                continue
            if step.module is not None:
                raise PassError(op, f"the fragment is exported already, as @{step.module}")
            with op.location, ir.InsertionPoint(module.body):
                made = _outline(op, step.mesh, meshes[step.mesh])
                _copy_computations(op, symbols, made)
                made.attributes["sym_name"] = ir.StringAttr.get(step.name)
                unique = symbols.insert(made)
                op.attributes[data.MODULE] = ir.FlatSymbolRefAttr.get(unique.value)


def _outline(op: mpmd.FragmentOp, mesh_name: str, mesh: Mesh) -> ir.Operation:
    """Makes a module at the insertion point; its function gets a copy of the fragment's ops."""
    nested = ir.Operation.create("builtin.module", regions=1)
    copy = op.operation.clone()
    source = body(copy)
    *operations, end = source.operations
    types = ([a.type for a in source.arguments], [value.type for value in end.operands])
    with ir.InsertionPoint(nested.regions[0].blocks.append()):
        sdy.MeshOp(mesh_name, mesh.to_attr())
        function = func.FuncOp("main", ir.FunctionType.get(*types), visibility="public")
    block = function.add_entry_block()
    for old, new in zip(source.arguments, block.arguments, strict=True):
        old.replace_all_uses_with(new)
    for inner in operations:
        block.append(inner)
    with ir.InsertionPoint(block):
        func.ReturnOp(list(end.operands))
    copy.erase()
    made = FragmentModule(fragment=op, function=function, mesh_name=mesh_name, mesh=mesh)
    attrs = zip([*made.arguments, *made.results], [*op.operands, *op.results], strict=True)
    for given, value in attrs:
        given[SHARDING] = _closed(op, _planned(value), mesh_name).to_attr()
    made.write_signature()
    for inner in walk(block):
        _clean(inner, mesh_name)
    return nested


def _copy_computations(op: mpmd.FragmentOp, symbols: ir.SymbolTable, made: ir.Operation) -> None:
    """Copies the functions that the custom calls of a fragment compute with into its module."""
    names = computations(op)
    for name in names:  # grows: those of a function that was copied
        copy = symbols[name].operation.clone(ip=ir.InsertionPoint(made.regions[0].blocks[0]))
        names += [other for other in computations(copy.opview) if other not in names]


def _clean(op: ir.OpView, mesh: str) -> None:
    """Drops Alpa's attributes of an op and closes its shardings."""
    for name in [name for name in op.attributes if name.startswith("alpa.")]:
        del op.attributes[name]
    shardings = op_shardings(op)
    if shardings is not None:
        set_op_shardings(op, tuple(_closed(op, sharding, mesh) for sharding in shardings))


def _planned(value: ir.Value) -> Sharding:
    """The sharding of a value of @main; without one each device holds it all."""
    tensor = MeshTensor.from_type(value.type)
    return tensor.sharding or Sharding(tensor.mesh, ((),) * tensor.type.rank)


def _closed(op: ir.OpView, sharding: Sharding, mesh: str) -> Sharding:
    """A sharding that propagation may not extend.

    Raises:
        PassError: it is over another mesh than the fragment's.
    """
    if sharding.mesh != mesh:
        raise PassError(op, f"a sharding over @{sharding.mesh} in a fragment on {mesh}")
    return replace(sharding, open_dims=frozenset())
