"""Gives a result a value of its own if that of another value or of an argument does not do."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import body, func, ir, sdy, stablehlo, terminator
from alpa.dialects.attributes import Part
from alpa.dialects.sharding import Sharding, narrower, signature_shardings
from alpa.dialects.symbols import lift_inlined_meshes, meshes_by_name
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.layer_placement import readers


def separate_results(module: ir.Module, main: func.FuncOp) -> None:
    """Inserts constraints so that each returned value has one sharding.

    A stored value has one layout. If a result aliases an argument or an earlier result but requests
    a different sharding, it gets a constraint.
    """
    lift_inlined_meshes(module)
    meshes = meshes_by_name(module)
    given = signature_shardings(main, "arg_attrs")
    block, end = body(main), terminator(body(main))
    stored: dict[ir.Value, Sharding] = {block.arguments[n]: s for n, s in given.items()}
    for number, sharding in signature_shardings(main, "res_attrs").items():
        value, mesh = end.operands[number], meshes[sharding.mesh]
        old = stored.setdefault(value, sharding)
        both = narrower(old, sharding, mesh) if meshes[old.mesh] == mesh else None
        if both is not None:
            stored[value] = both
            continue
        with ir.InsertionPoint(end), end.location:
            constraint = sdy.ShardingConstraintOp(value, sharding.to_attr())
        end.operands[number] = constraint.result


def separate_states(graph: Graph, part: Sequence[Part | None], end: ir.OpView) -> list[ir.OpView]:
    """Gives each returned result of an op that the forward part reads a value of its own.

    They are made of no batch: the forward part computes them, and the update returns them. Returns
    the barriers that make the new values, at the end of the block.
    """
    part = list(part)
    found = set[int]()
    for o in sorted({graph.producer[v] for v in graph.returned} - {-1}, reverse=True):
        users = (user for v in graph.results[o] for user in readers(graph, part, v))
        if part[o] == "update" and any(part[user] in ("forward", "backward") for user in users):
            part[o] = "forward"  # and what it reads is read by the forward part
            found.add(o)
    barriers: list[ir.OpView] = []
    for r, v in enumerate(graph.returned):
        if graph.producer[v] not in found:
            continue
        with ir.InsertionPoint(end), graph.ops[graph.producer[v]].location:
            barriers.append(stablehlo.OptimizationBarrierOp([graph.values[v]]))
        end.operands[r] = barriers[-1].results[0]
    return barriers


def give_an_op(block: ir.Block) -> None:
    """Passes the first result on through a barrier if a program only returns arguments.

    Layers and stages consist of ops.
    """
    end = terminator(block)
    if len(block.operations) == 1 and len(end.operands):
        with ir.InsertionPoint(end), end.location:
            end.operands[0] = stablehlo.OptimizationBarrierOp([end.operands[0]]).results[0]
