"""Finds references to symbols: custom calls to functions, shardings to meshes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from alpa.dialects import body, func, ir, is_public, ops_where, passmanager, sdy, walk
from alpa.dialects.sharding import Mesh

# A reference in an attribute's text: quoted or not.
SYMBOL = re.compile(r'@(?:"((?:[^"\\]|\\.)*)"|([\w$.-]+))')
# Attributes of ops that name a mesh: shardings, and groups of the collectives in a shard_map.
_OVER_MESHES = frozenset(
    {"sharding", "in_shardings", "out_shardings", "replica_groups", "sdy.sharding"}
)
_COMPUTATIONS = "called_computations"
_IN_PLAIN_OPS = ("sdy.sharding", "replica_groups")


def referenced_symbols(function: func.FuncOp, ops: Sequence[ir.OpView] | None = None) -> list[str]:
    """The symbols that a function's signature and ops refer to.

    Args:
        function: the function.
        ops: those of its ops that are looked at; None: all.
    """
    found: dict[str, None] = {}

    def read(attr: ir.Attribute) -> None:
        found.update(dict.fromkeys(a or b for a, b in SYMBOL.findall(str(attr))))

    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            read(function.attributes[name])
    if ops is None:
        ops = ops_where(function, _may_refer)
    for op in ops:
        name = op.operation.name
        keys = _IN_PLAIN_OPS if _is_plain(name) else op.attributes.keys()
        for key in keys:
            if key in op.attributes:
                read(op.attributes[key])
    return list(found)


def hide_computations(module: ir.Module) -> None:
    """Makes functions private that a custom call computes with. JAX writes them as public ones."""
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    public = {op.name.value: op for op in functions if is_public(op)}
    if len(public) <= 1:
        return
    for name in computations(module):
        if name in public:
            private = ir.StringAttr.get("private", module.context)
            public[name].attributes["sym_visibility"] = private


def computations(root: ir.Module | ir.OpView) -> list[str]:
    """The functions that custom calls in an op's regions compute with."""
    found: dict[str, None] = {}
    for op in ops_where(root, lambda op: _COMPUTATIONS in op.attributes):
        symbols = ir.ArrayAttr(op.attributes[_COMPUTATIONS])
        found.update(dict.fromkeys(ir.FlatSymbolRefAttr(symbol).value for symbol in symbols))
    return list(found)


def _is_plain(name: str) -> bool:
    """Whether an op of a name refers to meshes only, and in two attributes only.

    Any attribute of another op may hold a reference, so the printed form is searched.
    """
    return name.startswith(("stablehlo.", "chlo.")) and name != "stablehlo.custom_call"


def _may_refer(op: ir.Operation) -> bool:
    if _is_plain(op.name):
        return any(key in op.attributes for key in _IN_PLAIN_OPS)
    return op.name != "func.return"


def lift_inlined_meshes(module: ir.Module) -> None:
    """Gives a name to each mesh that is inlined in a sharding."""
    with module.context:
        manager = passmanager.PassManager.parse("builtin.module(sdy-lift-inlined-meshes)")
        manager.enable_verifier(False)  # Passes verify once, at their end.
        manager.run(module.operation)


def named_meshes(module: ir.Module) -> dict[str, sdy.MeshOp]:
    """The meshes of a module by their names."""
    return _meshes_in(module.body)


def _meshes_in(block: ir.Block) -> dict[str, sdy.MeshOp]:
    return {op.sym_name.value: op for op in block.operations if isinstance(op, sdy.MeshOp)}


def meshes_by_name(module: ir.Module) -> dict[str, Mesh]:
    """The meshes of a module as dataclasses, by their names."""
    return {name: Mesh.from_attr(op.mesh) for name, op in named_meshes(module).items()}


def mesh_of(op: sdy.ManualComputationOp) -> Mesh | None:
    """The mesh of a manual computation in a module; None if it has no operands and results, or
    holds its mesh inline."""
    for name in ("in_shardings", "out_shardings"):
        for sharding in sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings:
            mesh = sdy.TensorShardingAttr(sharding).mesh_or_ref
            if not isinstance(mesh, ir.FlatSymbolRefAttr):
                return None
            around = op.operation
            while around.parent is not None:
                around = around.parent.operation
            return Mesh.from_attr(_meshes_in(body(around))[mesh.value].mesh)
    return None


def rename_meshes(block: ir.Block, old: AbstractSet[str], new: str) -> None:
    """Makes all ops of a block name one mesh in place of others."""
    for op in walk(block):
        for attribute in _OVER_MESHES & {*op.attributes.keys()}:
            text = str(op.attributes[attribute])
            renamed = SYMBOL.sub(lambda m: f"@{new}" if (m[1] or m[2]) in old else m[0], text)
            if renamed != text:
                op.attributes[attribute] = ir.Attribute.parse(renamed)


def drop_unused_meshes(module: ir.Module) -> None:
    """Erases each `sdy.mesh` that no function refers to."""
    meshes = named_meshes(module)
    if not meshes:
        return
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    referenced = {name for function in functions for name in referenced_symbols(function)}
    for name, op in meshes.items():
        if name not in referenced:
            op.operation.erase()
