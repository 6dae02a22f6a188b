"""The modules of a planned program's fragments, for the passes that `export-stages` runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from alpa.dialects import body, func, ir, is_public, main_function, mpmd, terminator
from alpa.dialects.attributes import signature_attrs
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.sharding import Mesh
from alpa.dialects.symbols import meshes_by_name
from alpa.passes.base import PassError
from alpa.passes.plan.data import MODULE

Attrs = dict[str, ir.Attribute]
SHARDING = "sdy.sharding"


@dataclass(frozen=True, kw_only=True)
class FragmentModule:
    """A fragment of @main, the function of its module, and the mesh that both are for."""

    fragment: mpmd.FragmentOp
    function: func.FuncOp
    mesh_name: str
    mesh: Mesh

    @cached_property
    def arguments(self) -> list[Attrs]:
        """The attributes of each argument of the function, for `write_signature`."""
        return signature_attrs(self.function, "arg_attrs", len(self.function.arguments))

    @cached_property
    def results(self) -> list[Attrs]:
        """The attributes of each result of the function, for `write_signature`."""
        return signature_attrs(self.function, "res_attrs", len(self.function.type.results))

    def write_signature(self) -> None:
        """Gives the function the types of its block, and `arguments` and `results`."""
        for name, attrs in (("arg_attrs", self.arguments), ("res_attrs", self.results)):
            self.function.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attrs])
        block = self.function.entry_block
        inputs, outputs = block.arguments, terminator(block).operands
        type_ = ir.FunctionType.get([v.type for v in inputs], [v.type for v in outputs])
        self.function.attributes["function_type"] = ir.TypeAttr.get(type_)

    def write_numbers(self, name: str, numbers: Sequence[int]) -> None:
        """Writes numbers of arguments or results on the fragment, unless there are none."""
        if numbers:
            self.fragment.attributes[name] = ir.DenseI64ArrayAttr.get(numbers)


def fragment_modules(module: ir.Module) -> Iterator[FragmentModule]:
    """The module of each fragment, in program order.

    Raises:
        PassError: a fragment has no module, or one without a public function or its mesh.
    """
    nested = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if op.operation.name == "builtin.module"
    }
    for op in body(main_function(module)).operations:
        if not isinstance(op, mpmd.FragmentOp):
            continue
        symbol = op.attributes.get(MODULE)
        name = symbol.value if isinstance(symbol, ir.FlatSymbolRefAttr) else None
        if name not in nested:
            raise PassError(op, "the fragment has no module; run outline-fragments first")
        yield _read(op, name, cast(ir.Module, nested[name]))


def _read(op: mpmd.FragmentOp, name: str, nested: ir.Module) -> FragmentModule:
    mesh_name = mesh_of(op)
    inside = nested.body.operations
    functions = [it for it in inside if isinstance(it, func.FuncOp) and is_public(it)]
    mesh = meshes_by_name(nested).get(mesh_name)
    if len(functions) != 1 or mesh is None:
        raise PassError(
            op,
            f"module @{name} needs one public function and the mesh @{mesh_name}; it has "
            f"{len(functions)} and the meshes {', '.join(meshes_by_name(nested))}",
        )
    return FragmentModule(fragment=op, function=functions[0], mesh_name=mesh_name, mesh=mesh)
