"""Merges fragments of a mesh that run one directly after the other.

XLA compiles each fragment by itself. What one hands to the next is written to memory, and nothing
is fused across. Each call costs the host time for each array that it takes or returns. So a forward
part and the backward part that follows it become one fragment: on one mesh alone, and in the last
stage of a pipeline. The result is a backward part, in which `cse` leaves one of equal ops, as XLA
does: weights that both parts convert are then in memory between.

With one micro-batch, a backward part also takes in the updates that read nothing else: on one mesh,
the step is then one module, as in plain JAX. With several, updates run once per step, and stay
apart.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"}
          (%a: tensor<8xf32>) {
        %0 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}]>]>}
          : tensor<8xf32>
        mpmd.return %0 : tensor<8xf32>
      } : (!x) -> !x
      %z = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%y, %x) {alpa.part = "backward"}
          (%a: tensor<8xf32>, %b: tensor<8xf32>) {
        %0 = stablehlo.multiply %a, %b : tensor<8xf32>
        mpmd.return %0 : tensor<8xf32>
      } : (!x, !x) -> !x
      return %z : !x
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %z = mpmd.fragment<mesh="mesh_0", origin=["layer_0", "layer_0"(1)]> (%x)
          {alpa.part = "backward"} (%a: tensor<8xf32>) {
        %0 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}]>]>}
          : tensor<8xf32>
        %1 = stablehlo.multiply %0, %a : tensor<8xf32>
        mpmd.return %1 : tensor<8xf32>
      } : (…) -> …
      return %z : …
    }

**Requires**: a plan whose micro-batches can be run as it says (`plan/checks.py`).

**Ensures**: the same values are computed, in the same shardings where they crossed. `alpa.seconds`
of what is merged are added up, less the calls and the ops that are saved. Fragments stay apart

* if the second computes layers again (`alpa.remat`): XLA would find that they are there already;
* if a partial sum crosses, or they belong to different stages of the mesh;
* if an update reads what another fragment makes, such as the norm of all gradients;
* with several micro-batches, if an update reads what the forward part makes, or if that is carried
  from one micro-batch to the next.

**Options**: none.

**Fails when** the micro-batches cannot be run as the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from alpa.dialects import body, ir, main_function, mpmd, passmanager, sdy
from alpa.dialects.attributes import (
    BACKWARD,
    COMPUTE_SECONDS,
    PART,
    REMAT,
    SECONDS,
    read_float,
    read_ints,
    read_part,
)
from alpa.dialects.mpmd_types import MeshTensor, Origin, fragment, mesh_of, return_, stage_of
from alpa.dialects.records import f64
from alpa.dialects.sharding import Sharding, op_shardings, set_op_shardings
from alpa.passes.base import Pass, Remark, errors_at
from alpa.passes.plan.data import READ_BY_UPDATE, Fragment, Program
from alpa.passes.plan.fragment_costs import FragmentCosts
from alpa.passes.plan.reader import read_planned


@dataclass(frozen=True, kw_only=True)
class MergeFragments(Pass):
    """Merges fragments of a mesh that run one after the other."""

    name: ClassVar[str] = "merge-fragments"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = main_function(module)
        with errors_at(function):
            costs = FragmentCosts.of(function)
        # XLA computes once what both parts compute: the memory of the result is told from that.
        once = passmanager.PassManager.parse("mpmd.fragment(cse)", module.context)
        while (pair := _next_pair(module)) is not None:
            apart = sum(map(costs.seconds, pair))
            merged = _merge(*pair)
            once.run(merged.operation)
            _write_seconds(merged, pair, saved=apart - costs.seconds(merged))
            for op in reversed(pair):
                op.erase()


def _next_pair(module: ir.Module) -> tuple[mpmd.FragmentOp, mpmd.FragmentOp] | None:
    """Two fragments to merge."""
    program = read_planned(module)
    ops = [*body(main_function(module)).operations]
    before: dict[str, int] = {}
    for number, (step, op) in enumerate(zip(program.steps, ops, strict=False)):
        if not isinstance(step, Fragment) or not isinstance(op, mpmd.FragmentOp):
            continue
        start = before.get(step.mesh)
        before[step.mesh] = number
        if start is None:
            continue
        first, earlier = program.steps[start], ops[start]
        assert isinstance(first, Fragment)
        assert isinstance(earlier, mpmd.FragmentOp)
        if first.stage != step.stage and step.part != "update":
            continue  # another stage of the mesh
        between = ops[start + 1 : number]
        if _can_merge(program, first, step) and not _is_awaited(earlier, between):
            return earlier, op
    return None


def _can_merge(program: Program, first: Fragment, second: Fragment) -> bool:
    """Whether two fragments of a mesh may run at once, by their parts and what reads them."""
    if (first.part, second.part) == ("backward", "update"):
        made = {value for value in second.inputs if program.parts[value] is not None}
        return program.num_micro_batches == 1 and made <= set(first.outputs)
    if (first.part, second.part) != ("forward", "backward") or second.remat:
        return False
    # They will run in the place of the forward part, before other backward parts.
    if program.made_by("backward") & {program.sources[value] for value in second.inputs}:
        return False
    carried = {program.sources[value] for value in program.carries.values()}
    kept = set(first.outputs) & (program.read_by_updates | carried)
    return program.num_micro_batches == 1 or not kept


def _is_awaited(fragment: mpmd.FragmentOp, between: Sequence[ir.OpView]) -> bool:
    """Whether one of the ops between reads a result of a fragment, or it is a partial sum."""
    tensors = (MeshTensor.from_type(it.type) for it in fragment.results)
    return any(it.sharding is not None and it.sharding.unreduced for it in tensors) or any(
        value in fragment.results for op in between for value in op.operands
    )


def _merge(first: mpmd.FragmentOp, second: mpmd.FragmentOp) -> mpmd.FragmentOp:
    """Puts a fragment with the ops of both in the place of the second, which is left empty."""
    kept = [it for it in first.results if any(use.owner != second.operation for use in it.uses)]
    inputs = [*first.operands, *(it for it in second.operands if it not in first.results)]
    inputs = [*dict.fromkeys(inputs)]
    with ir.InsertionPoint(second):
        op, block = fragment(
            mesh_of(second),
            [Origin.from_attr(it) for it in (*_origins(first), *_origins(second))],
            stage_of(first),  # An update has the number of the first stage of its mesh.
            inputs,
            [it.type for it in (*kept, *second.results)],
            loc=second.location,
        )
    op.attributes[PART] = ir.StringAttr.get("backward")
    for name in (REMAT, BACKWARD):
        if name in first.attributes:
            op.attributes[name] = first.attributes[name]
    if only := _read_by_update(first, second, inputs):
        op.attributes[READ_BY_UPDATE] = ir.DenseI64ArrayAttr.get(only)
    inside: dict[ir.Value, ir.Value] = dict(zip(inputs, block.arguments, strict=True))
    made = _move(first, inside, block)
    handed = {it for it in second.operands if it in made}
    with ir.InsertionPoint(block):
        inside.update((it, _as_handed(it, made[it], first)) for it in handed)
    made |= _move(second, inside, block)
    results = [*kept, *second.results]
    with ir.InsertionPoint(block), op.location:
        return_([made[it] for it in results])
    for old, new in zip(results, op.results, strict=True):
        old.replace_all_uses_with(new)
    return op


def _read_by_update(
    first: mpmd.FragmentOp, second: mpmd.FragmentOp, inputs: Sequence[ir.Value]
) -> list[int]:
    """The numbers of inputs of a merged fragment that only its updates read.

    Updates are merged last, so a forward and a backward part have none.
    """
    if read_part(second) != "update":
        return []
    before = read_ints(first, READ_BY_UPDATE)
    others = {it for number, it in enumerate(first.operands) if number not in before}
    return [number for number, it in enumerate(inputs) if it not in others]


def _origins(op: mpmd.FragmentOp) -> ir.ArrayAttr:
    return ir.ArrayAttr(op.attributes["origin"])


def _move(
    op: mpmd.FragmentOp, inside: dict[ir.Value, ir.Value], block: ir.Block
) -> dict[ir.Value, ir.Value]:
    """Moves the ops of a fragment to the end of a block; its results -> the values there."""
    source = body(op)
    for argument, operand in zip(source.arguments, op.operands, strict=True):
        argument.replace_all_uses_with(inside[operand])
    *operations, end = source.operations
    returned = [*end.operands]
    for inner in operations:
        block.append(inner)
    return dict(zip(op.results, returned, strict=True))


def _as_handed(value: ir.Value, inner: ir.Value, maker: mpmd.FragmentOp) -> ir.Value:
    """A value inside of a fragment, in the sharding in which it was handed on."""
    tensor = MeshTensor.from_type(value.type)
    wanted = tensor.sharding or Sharding(tensor.mesh, ((),) * tensor.type.rank)
    if _sharding_of(inner) == replace(wanted, open_dims=frozenset()):
        return inner
    constraint = sdy.ShardingConstraintOp(inner, wanted.to_attr(), loc=maker.location)
    set_op_shardings(constraint, (wanted,))
    return constraint.result


def _sharding_of(value: ir.Value) -> Sharding | None:
    """What the op that makes a value says of it; None where a block or nothing says it."""
    if isinstance(value.owner, ir.Block):
        return None
    shardings = op_shardings(value.owner)
    number = ir.OpResult(value).result_number
    return None if shardings is None else replace(shardings[number], open_dims=frozenset())


def _write_seconds(
    merged: mpmd.FragmentOp, parts: Sequence[mpmd.FragmentOp], *, saved: float
) -> None:
    """Writes the seconds of a fragment that is made of others."""
    seconds = _total(parts, SECONDS)
    if seconds is not None:
        merged.attributes[SECONDS] = f64(max(seconds - max(saved, 0.0), 0.0))
    compute = _total(parts, COMPUTE_SECONDS)
    if compute is not None:
        merged.attributes[COMPUTE_SECONDS] = f64(compute)


def _total(ops: Sequence[mpmd.FragmentOp], name: str) -> float | None:
    """The sum of an attribute; None if one of the ops does not have it."""
    found = [it for it in (read_float(op, name) for op in ops) if it is not None]
    return sum(found) if len(found) == len(ops) else None
