"""Cuts loops over layers between their trips, and the tensors that stack their rows.

`jax.lax.scan` over stacked parameters keeps the layers of a model in one `stablehlo.while`, and no
pipeline can be cut through a loop. If the trip count is known and each trip takes a row of the
parameters, the loop is cut into parts of consecutive trips. A part of one trip is straight code.
Forward and backward loops over the same rows are cut at the same rows. Everything that stacks these
rows is cut, too: parameters, residuals, gradients, the optimizer's state and its update. So each
part can have a stage of its own that holds its own state only. A reduction over all rows, such as a
global norm, becomes a partial reduction of each part and one over the parts.

A loop stays whole, in one layer, if its trip count is unknown, if no state is stacked in it, or if
the program shards the stacked dimension. A remark says which.

**Before**::

    func.func public @main(%w: tensor<2x8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %trips = stablehlo.constant dense<2> : tensor<i32>
      %0:3 = stablehlo.while(%i = %zero, %h = %x, %p = %w)
          : tensor<i32>, tensor<4x8xf32>, tensor<2x8x8xf32>
      cond {
        %c = stablehlo.compare LT, %i, %trips : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %row = stablehlo.dynamic_slice %p, %i, %zero, %zero, sizes = [1, 8, 8]
          : (tensor<2x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
        %m = stablehlo.reshape %row : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
        %n = stablehlo.dot_general %h, %m, contracting_dims = [1] x [0]
          : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        %j = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %j, %n, %p : tensor<i32>, tensor<4x8xf32>, tensor<2x8x8xf32>
      }
      return %0#1 : tensor<4x8xf32>
    }

**After** `split-loops{num-layers=2}`::

    func.func public @main(
        %w0: tensor<1x8x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 0, 1>},
        %w1: tensor<1x8x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 1, 2>},
        %x: tensor<4x8xf32> {alpa.input = 1 : i64}) -> (tensor<4x8xf32> {alpa.output = 0 : i64}) {
      %0 = stablehlo.reshape %w0 {alpa.follow = 0 : i64} : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      %2 = stablehlo.reshape %w1 {alpa.follow = 0 : i64} : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
      %3 = stablehlo.dot_general %1, %2, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      return %3 : tensor<4x8xf32>
    }

**Requires**: a function as `simplify-trivial-ops` leaves it.

**Ensures**: an argument that is a stack of a cut loop becomes one argument per part. Its
`alpa.slice` says which rows of argument `alpa.input` of the given program it takes, along which
dimension. The same holds for results. If a loop was cut, the roles that were inferred are written.

**Options**: see the fields.

**Fails when** a role is malformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

from alpa.dialects import body, func, ir, stablehlo, terminator, walk
from alpa.dialects.attributes import (
    Argument,
    Result,
    Slice,
    input_number,
    output_number,
    signature_attrs,
    write_interface,
)
from alpa.dialects.sharding import signature_shardings
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.input_checks import check_input, check_unplanned
from alpa.passes.analysis.op_kinds import CONTRACTIONS
from alpa.passes.analysis.roles import Roles, infer_roles
from alpa.passes.base import Pass, Remark, option
from alpa.passes.layer_cluster import MOST_LAYERS
from alpa.passes.loops.cut import Cut, Cutter, Rows
from alpa.passes.loops.layer_loops import LayerLoop, layer_loop
from alpa.passes.loops.stacks import Stack, find_stacks
from alpa.passes.simplify.follow import mark_follow
from alpa.passes.simplify.identities import REWRITES
from alpa.passes.simplify.rewriter import simplify


@dataclass(frozen=True, kw_only=True)
class SplitLoops(Pass):
    """Cuts loops over layers between their trips, with the parameters that they stack."""

    name: ClassVar[str] = "split-loops"
    num_layers: int | Literal["auto"] = option(
        "auto",
        "number of parts into which the trips of all loops are split; `auto` makes at most 16",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module, is_checked=self.is_checked)
        check_unplanned(function)
        loops = _layer_loops(function, remark)
        if not loops:
            return
        interface = _Interface.of(function)
        stacks: list[Stack] = []
        for stack in find_stacks(loops):
            reason = interface.against_cutting(stack)
            if reason is None:
                stacks.append(stack)
            else:
                for loop in stack.loops:
                    _stays_whole(loop.op, reason, remark)
        rows = [self._rows(stack, sum(other.rows for other in stacks)) for stack in stacks]
        chosen = [(stack, cut) for stack, cut in zip(stacks, rows, strict=True) if len(cut) > 1]
        if chosen:
            for sentence in interface.roles.ambiguous:
                remark(function.location, f"{sentence}; it matters with several micro-batches only")
            _rewrite(function, interface, chosen)

    def _rows(self, stack: Stack, total: int) -> Rows:
        """Where to cut a stack when there are `total` rows in all."""
        if self.num_layers == "auto":
            count = -(-total // -(-total // MOST_LAYERS))  # parts of equal size where that can be
        else:
            count = self.num_layers
        parts = max(1, min(stack.rows, round(stack.rows * count / total)))
        bounds = [k * stack.rows // parts for k in range(parts + 1)]
        return tuple(pairwise(bounds))


def _layer_loops(function: func.FuncOp, remark: Remark) -> list[LayerLoop]:
    loops: list[LayerLoop] = []
    for op in body(function).operations:
        if isinstance(op, stablehlo.WhileOp):
            loop = layer_loop(op)
            if isinstance(loop, LayerLoop):
                loops.append(loop)
            else:
                _stays_whole(op, loop, remark)
    return loops


def _stays_whole(op: ir.OpView, reason: str, remark: Remark) -> None:
    """Says so of a loop that computes something."""
    if any(inner.operation.name in CONTRACTIONS for inner in walk(body(op, 1))):
        remark(op.location, f"this loop stays whole, in one layer: {reason}")


@dataclass(frozen=True)
class _Interface:
    """The arguments and results of @main, and what is known of them."""

    function: func.FuncOp
    roles: Roles
    pairs: dict[int, int]
    arguments: list[ir.Value]
    returned: list[ir.Value]

    @classmethod
    def of(cls, function: func.FuncOp) -> _Interface:
        block = body(function)
        roles = infer_roles(function, Graph.of(block))
        returned = list(terminator(block).operands)
        return cls(function, roles, roles.state_pairs(), list(block.arguments), returned)

    def against_cutting(self, stack: Stack) -> str | None:
        """Why a stack should stay whole; None where it should be cut."""
        if not any(self.is_cut(a, stack.dims) for a in range(len(self.arguments))):
            return "no state is stacked in it; what its trips share would be on every stage"
        for values, shardings in (
            (self.arguments, signature_shardings(self.function, "arg_attrs")),
            (self.returned, signature_shardings(self.function, "res_attrs")),
        ):
            for number, sharding in shardings.items():
                dim = stack.dims.get(values[number])
                if dim is not None and sharding.dims[dim]:
                    return f"the program shards its trips, dimension {dim} of {sharding.to_attr()}"
        return None

    def is_cut(self, argument: int, stacked: Mapping[ir.Value, object]) -> bool:
        """Whether an argument is one of the stacked tensors and no batch, before and after.

        `stacked` says how: it gives the dimension, or the cut, of each.
        """
        attributes = self.roles.arguments[argument]
        given = attributes.role in ("state", "constant") or (
            attributes.role is None and not self.pairs
        )
        how = stacked.get(self.arguments[argument])
        new = [self.returned[r] for r, a in self.pairs.items() if a == argument]
        return (
            given
            and how is not None
            and attributes.slice is None
            and all(stacked.get(value) == how for value in new)
        )

    def cut_of_result(self, result: int, cuts: Mapping[ir.Value, Cut]) -> Cut | None:
        """How a result is cut: as a stacked tensor whose state, if it replaces one, is cut."""
        cut, role = cuts.get(self.returned[result]), self.roles.results[result].role
        if cut is None or (role is not None and role.kind == "concat" and role.index == cut.dim):
            return None
        whole = result in self.pairs and not self.is_cut(self.pairs[result], cuts)
        return None if whole else cut


def _rewrite(
    function: func.FuncOp, interface: _Interface, chosen: Sequence[tuple[Stack, Rows]]
) -> None:
    """Builds the new @main before the old one, then erases that."""
    cuts = {v: Cut(dim, rows) for stack, rows in chosen for v, dim in stack.dims.items()}
    arguments = [
        cuts[value] if interface.is_cut(a, cuts) else None
        for a, value in enumerate(interface.arguments)
    ]
    results = [interface.cut_of_result(r, cuts) for r in range(len(interface.returned))]
    with ir.InsertionPoint(function), function.location:
        type_ = ir.FunctionType.get(
            _types(interface.arguments, arguments), _types(interface.returned, results)
        )
        new = func.FuncOp(function.sym_name.value, type_, visibility="public")
    loops = {loop.op.results[0]: (loop, rows) for stack, rows in chosen for loop in stack.loops}
    cutter = Cutter(new.add_entry_block(), cuts, loops)
    given = iter(cutter.block.arguments)
    for value, cut in zip(interface.arguments, arguments, strict=True):
        cutter.parts[value] = {cut: [next(given) for _ in _slices(cut)]}
    *ops, end = body(function).operations
    for op in ops:
        cutter.copy(op)
    with ir.InsertionPoint(cutter.block), end.location:
        returned: list[ir.Value] = []
        for value, cut in zip(interface.returned, results, strict=True):
            returned += cutter.get_parts(value, cut)
        func.ReturnOp(returned)
    _write_signature(new, interface, arguments, results)
    function.erase()
    simplify(cutter.block, REWRITES)
    mark_follow(cutter.block)


def _types(values: Sequence[ir.Value], cuts: Sequence[Cut | None]) -> list[ir.Type]:
    """The types of values, each part of one that is cut for itself."""
    pairs = zip(values, cuts, strict=True)
    return [type_ for value, cut in pairs for type_ in (cut.types(value) if cut else [value.type])]


def _write_signature(
    new: func.FuncOp,
    interface: _Interface,
    arguments: Sequence[Cut | None],
    results: Sequence[Cut | None],
) -> None:
    """Attributes of the parts: those of the whole, with the slice that each is."""
    old, roles = interface.function, interface.roles
    for name in old.attributes:
        if name not in new.attributes:
            new.attributes[name] = old.attributes[name]
    inputs, outputs = _pieces(arguments), _pieces(results)
    position = {piece: number for number, piece in enumerate(outputs)}
    new_results: list[Result] = []
    for r, part in outputs:
        result = roles.results[r]
        rows = part or result.slice
        new_results.append(replace(result, output=output_number(r, result), slice=rows))
    new_arguments: list[Argument] = []
    for a, part in inputs:
        argument = roles.arguments[a]
        alias = argument.aliasing_output
        target = None if alias is None else position.get((alias, part))
        new_arguments.append(
            replace(
                argument,
                input=input_number(a, argument),
                slice=part or argument.slice,
                aliasing_output=target,
                donor=argument.donor or (alias is not None and target is None),
            )
        )
    of_arguments = signature_attrs(old, "arg_attrs", len(arguments))
    of_results = signature_attrs(old, "res_attrs", len(results))
    new.attributes["arg_attrs"] = _array(of_arguments[a] for a, _ in inputs)
    new.attributes["res_attrs"] = _array(of_results[r] for r, _ in outputs)
    write_interface(new, new_arguments, new_results)


def _array(attrs: Iterable[dict[str, ir.Attribute]]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([ir.DictAttr.get(own) for own in attrs])


def _pieces(cuts: Sequence[Cut | None]) -> list[tuple[int, Slice | None]]:
    """The number and the slice of each part of the arguments or results that are cut so."""
    return [(number, part) for number, cut in enumerate(cuts) for part in _slices(cut)]


def _slices(cut: Cut | None) -> list[Slice | None]:
    """The slice that each part is; one that is no slice where nothing is cut."""
    return [Slice(cut.dim, start, stop) for start, stop in cut.rows] if cut else [None]
