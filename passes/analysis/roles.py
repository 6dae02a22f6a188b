"""Roles of the arguments and results of @main: read where given, inferred where unique."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from alpa.dialects import func, ir
from alpa.dialects.attributes import (
    Argument,
    Result,
    ResultRole,
    input_number,
    read_arguments,
    read_results,
    state_pairs,
)
from alpa.dialects.sharding import Mesh, Sharding, narrower, signature_shardings
from alpa.dialects.symbols import meshes_by_name
from alpa.passes.analysis.graph import Graph, shape
from alpa.passes.analysis.op_kinds import NOT_BY_ELEMENT
from alpa.passes.base import PassError


@dataclass(frozen=True)
class Roles:
    """Arguments and results of @main with their roles as far as they are known.

    `ambiguous` says, in words, what could not be inferred; it matters only with several
    micro-batches.
    """

    arguments: list[Argument]
    results: list[Result]
    ambiguous: tuple[str, ...] = ()

    def state_pairs(self) -> dict[int, int]:
        """Position of each new state -> position of the argument that holds the old."""
        return state_pairs(self.arguments, self.results)


def infer_roles(function: func.FuncOp, graph: Graph) -> Roles:
    """The roles that attributes give, completed by donation, data flow and shapes.

    Raises:
        PassError: an attribute is malformed or names an argument that does not exist.
    """
    try:
        arguments, results = read_arguments(function), read_results(function)
        flow = _Flow.of(function, graph)
    except ValueError as error:
        raise PassError(function, str(error)) from error
    pairs = _given_pairs(function, flow, arguments, results)
    ambiguous = _add_pairs_by_flow(flow, arguments, results, pairs)
    state = set(pairs.values())
    for r, a in pairs.items():
        role = ResultRole("state", input_number(a, arguments[a]))
        results[r] = replace(results[r], role=role)
    for a, argument in enumerate(arguments):
        if argument.role is None and a in state:
            arguments[a] = replace(argument, role="state")
    _complete_batch(graph, arguments, results, bool(state))
    return Roles(arguments, results, tuple(ambiguous))


@dataclass(frozen=True)
class _Flow:
    """Data flow from arguments to results, and the shardings that the program gives them."""

    graph: Graph
    arguments: dict[int, Sharding]
    results: dict[int, Sharding]
    meshes: dict[str, Mesh]

    @classmethod
    def of(cls, function: func.FuncOp, graph: Graph) -> _Flow:
        """Raises ValueError where a sharding holds its mesh inline."""
        module = function.operation.parent
        assert module is not None
        return cls(
            graph,
            signature_shardings(function, "arg_attrs"),
            signature_shardings(function, "res_attrs"),
            meshes_by_name(cast(ir.Module, module.operation.opview)),
        )

    def nearest(self, result: int) -> dict[int, int]:
        """The arguments that a result may be the new value of, with their distance."""
        found = nearest_arguments(self.graph, self.graph.returned[result])
        return {argument: d for argument, d in found.items() if self._agree(result, argument)}

    def _agree(self, result: int, argument: int) -> bool:
        """Whether both can have one layout, as a state has before and after the step."""
        new, old = self.results.get(result), self.arguments.get(argument)
        if new is None or old is None:
            return True
        mesh = self.meshes[old.mesh]
        return mesh == self.meshes[new.mesh] and narrower(old, new, mesh) is not None


def _given_pairs(
    function: func.FuncOp, flow: _Flow, arguments: list[Argument], results: list[Result]
) -> dict[int, int]:
    pairs = state_pairs(arguments, results)
    donated: dict[int, int] = {}
    for r, result in enumerate(results):
        if result.state is None:
            continue
        if r not in pairs:
            raise PassError(
                function,
                f"result {r} is the new value of argument {result.state[0]}, but @main has "
                f"{len(arguments)} arguments",
            )
        role = arguments[pairs[r]].role
        if role in ("batch", "constant"):
            raise PassError(
                function,
                f"result {r} is the new value of argument {result.state[0]}, whose role is {role}; "
                "give the argument the role state, or the result another role",
            )
    for a, argument in enumerate(arguments):
        r = argument.aliasing_output
        # A batch or a constant may be donated for its memory alone.
        is_state = argument.role not in ("batch", "constant")
        if r is not None and results[r].role is None and is_state:
            donated[r] = a
    free = [r for r in range(len(results)) if results[r].role is None]
    return _by_data_flow(flow, donated, free) | pairs


def _by_data_flow(flow: _Flow, donated: dict[int, int], free: list[int]) -> dict[int, int]:
    """Corrects the pairs that donation gives by data flow.

    JAX gives a donated buffer to the first result of its type, which may be a loss. If that result
    does not follow element by element from the argument but another one does, the other one is the
    new state.
    """
    graph = flow.graph
    nearest = {r: flow.nearest(r) for r in free}
    wrong = {a for r, a in donated.items() if a not in nearest[r]}
    types = {graph.values[a].type for a in wrong}
    doubtful = {a for a in donated.values() if graph.values[a].type in types}
    pairs = {r: a for r, a in donated.items() if a not in doubtful}
    found = [(d, r, a) for r in free for a, d in nearest[r].items() if a in doubtful]
    _add_nearest(found, pairs)
    _add_nearest(((0, r, a) for r, a in donated.items()), pairs)
    return pairs


def _add_pairs_by_flow(
    flow: _Flow, arguments: list[Argument], results: list[Result], pairs: dict[int, int]
) -> list[str]:
    """Pairs each new state with the nearest old one of its type that its update reads.

    Only where the program gives no pair at all: a front end that donates donates everything.
    Returns in words what is ambiguous.
    """
    if pairs or any(argument.role is not None for argument in arguments):
        return []
    free = [r for r, result in enumerate(results) if result.role is None]
    return _add_nearest(((d, r, a) for r in free for a, d in flow.nearest(r).items()), pairs)


def _add_nearest(candidates: Iterable[tuple[int, int, int]], pairs: dict[int, int]) -> list[str]:
    """Adds (distance, result, argument), the nearest first; returns in words what is ambiguous."""
    taken = set(pairs.values())
    distance: dict[int, int] = {}
    ambiguous: list[str] = []
    for d, r, a in sorted(candidates):
        if a not in taken and distance.get(r) == d:
            ambiguous.append(f"result {r} could be the new value of argument {pairs[r]} or {a}")
        elif a not in taken and r not in pairs:
            pairs[r], distance[r] = a, d
            taken.add(a)
    return ambiguous


def nearest_arguments(graph: Graph, value: int) -> dict[int, int]:
    """Arguments of the value's type reached through element-wise ops, with their distance."""
    wanted = graph.values[value].type
    found: dict[int, int] = {}
    seen = {value}
    queue = deque([(value, 0)])
    while queue:
        v, depth = queue.popleft()
        if v < graph.num_arguments:
            # A result that is an unchanged argument is still that state's value after the step.
            if graph.values[v].type == wanted:
                found[v] = depth
            continue
        # An optimizer works element by element, and a loss or a gradient does not. An op may have
        # an attribute that hides its own `name`.
        name = graph.ops[graph.producer[v]].operation.name
        is_by_element = name not in NOT_BY_ELEMENT and name.startswith(("stablehlo.", "chlo."))
        if not is_by_element and name != "sdy.sharding_constraint":
            continue
        for operand in graph.operands[graph.producer[v]]:
            if operand not in seen and graph.values[operand].type == wanted:
                seen.add(operand)
                queue.append((operand, depth + 1))
    return found


def _complete_batch(
    graph: Graph, arguments: list[Argument], results: list[Result], is_training: bool
) -> None:
    """In a training step, what is neither state nor key is the batch; its leading dimension
    is the samples where all such arguments agree, and a float scalar result is a mean."""
    if not is_training:
        return
    unknown = [a for a, argument in enumerate(arguments) if argument.role is None]
    shapes = {a: shape(graph.values[a]) for a in unknown}
    leading = {shape[0] for shape in shapes.values() if len(shape) > 0}
    for a in unknown:
        if len(leading) == 1 and len(shapes[a]) > 0:
            arguments[a] = replace(arguments[a], role="batch", batch_dim=0)
    batch = [a for a, argument in enumerate(arguments) if argument.role == "batch"]
    depends = graph.depends(batch)
    for r, value in enumerate(graph.returned):
        type_ = graph.values[value].type
        if results[r].role is not None or not depends[value]:
            continue
        is_scalar = isinstance(type_, ir.RankedTensorType) and type_.rank == 0
        if is_scalar and isinstance(type_.element_type, ir.FloatType):
            results[r] = replace(results[r], role=ResultRole("mean"))
