"""Finds the gradients that a program returns, where it updates no parameters itself.

PyTorch/XLA and `jax.value_and_grad` give programs that return the loss and the gradients, and leave
the update to another program. Nothing names the gradients, but a product gives them away. Where the
forward part multiplies a parameter by a *partner* (`dot(x, w)`, `convolution(x, w)`, `x * scale`),
the gradient of the parameter is a product of the same partner and a cotangent, which is computed
and no argument. Behind it are only ops that are linear in one value: sums, transposes, conversions,
scalings.

A result is a gradient if it has the type of an argument and is made of such a product. If there are
two of these at least, the other results of an argument's type are gradients, too: those of biases,
which are sums of cotangents, and of embeddings. A scalar is never one of the others, because losses
are scalars. All of this holds only if at least half of the arguments that the program reads have a
gradient. So programs that return a few tensors of their arguments' types keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from alpa.dialects.attributes import marker_of
from alpa.passes.analysis.graph import Graph, shape
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.op_kinds import ELEMENTWISE, LINEAR, OF_FACTORS
from alpa.passes.analysis.products import is_linear

_SAME_ELEMENTS = LINEAR | {
    "stablehlo.broadcast_in_dim",
    "stablehlo.reshape",
    "stablehlo.reverse",
    "stablehlo.transpose",
}
"""Ops of one operand whose result holds its elements in another form."""
_BETWEEN = ELEMENTWISE | _SAME_ELEMENTS | {"stablehlo.reduce"}
"""Ops between a gradient and the product that it is made of, where they are linear."""
_FEWEST = 2
"""One product may be a chance, above all in small programs whose tensors have equal types."""


def returned_gradients(graph: Graph, pairs: Mapping[int, int]) -> dict[int, int]:
    """For each result that is a gradient, the argument whose gradient it is.

    Args:
        graph: of the whole program.
        pairs: results that are new states, and the arguments with the old ones; they are left out.
    """
    results = {r: v for r, v in enumerate(graph.returned) if r not in pairs}
    states = set(pairs.values())
    read = [
        a
        for a in range(graph.num_arguments)
        if a not in states and graph.users[a] and is_float(graph.values[a].type)
    ]
    types = {graph.values[a].type for a in read}
    if sum(graph.values[v].type in types for v in results.values()) < _FEWEST:
        return {}
    root = _roots(graph)
    varying = graph.depends(range(graph.num_arguments))
    partners = _partners(graph, root, varying, read)
    found: dict[int, int] = {}

    def like(v: int) -> Iterator[int]:
        """The arguments whose gradient a value may be by its type."""
        if v >= graph.num_arguments and varying[v]:
            taken, type_ = set(found.values()), graph.values[v].type
            yield from (a for a in read if a not in taken and graph.values[a].type == type_)

    for r, v in results.items():
        possible = [a for a in like(v) if partners[a]]
        factors = _factors(graph, root, varying, v) if possible else set[int]()
        for a in possible:
            if not factors.isdisjoint(partners[a]):
                found[r] = a
                break
    if len(found) < _FEWEST:
        return {}
    for r, v in results.items():
        if r not in found and shape(graph.values[v]):
            for a in like(v):
                found[r] = a
                break
    return found if 2 * len(found) >= len(read) else {}


def _roots(graph: Graph) -> list[int]:
    """For each value the one whose elements it holds, in whatever form."""
    root = list(graph.first_equal)
    number = {value: v for v, value in enumerate(graph.values)}
    for op, results in zip(graph.ops, graph.results, strict=True):
        is_form = op.name in _SAME_ELEMENTS or marker_of(op) is not None
        if is_form or op.name == "stablehlo.optimization_barrier":
            for v, operand in zip(results, op.operands, strict=True):
                root[v] = root[number[operand]]
    return root


def _partners(
    graph: Graph, root: Sequence[int], varying: Sequence[bool], arguments: Sequence[int]
) -> dict[int, set[int]]:
    """For each argument the values by which it is multiplied."""
    found = {a: set[int]() for a in arguments}
    for op, operands in zip(graph.ops, graph.operands, strict=True):
        if op.name in OF_FACTORS and len(operands) == 2:
            first, second = (root[v] for v in operands)
            for a, partner in ((first, second), (second, first)):
                if a in found and varying[partner]:
                    found[a].add(partner)
    return found


def _factors(graph: Graph, root: Sequence[int], varying: Sequence[bool], value: int) -> set[int]:
    """The factors of the products that a value is a linear function of, by which something computed
    is multiplied."""
    factors, seen, stack = set[int](), {value}, [value]
    while stack:
        o = graph.producer[stack.pop()]
        if o < 0:
            continue
        op = graph.ops[o]
        read = [v for v in graph.operands[o] if varying[v]]
        if op.name in OF_FACTORS and len(read) == 2:
            first, second = (root[v] for v in read)
            factors.update(
                factor
                for factor, other in ((first, second), (second, first))
                if other >= graph.num_arguments
            )
        linear = op.name in _BETWEEN and is_linear(op, {graph.values[v] for v in read})
        if linear or marker_of(op) is not None:
            stack += [v for v in read if v not in seen]
            seen.update(read)
    return factors
