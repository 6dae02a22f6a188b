"""A function traced by JAX for one call: its jaxpr, its results by path, its module.

Functions among the leaves of arguments and results are left out. Typed keys are arguments of the
function; in the module they are their words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as JaxprLiteral
from jax.sharding import NamedSharding, PartitionSpec

from alpa.dialects import body, bytecode, ir, main_function, parse
from alpa.dialects.symbols import hide_computations
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.micro_batches.relate import relate
from alpa.passes.analysis.roles import nearest_arguments
from alpa.passes.pipelines.clock import Clock
from alpa.passes.sharding.rules import populated
from alpa.passes.sharding.tied_dims import tied_dims
from alpa.passes.simplify.scatter_add import scatter_apart
from alpa.runtime import calls, keys, markers
from alpa.runtime.calls import Call, LeafType, ResultLeaf, label
from alpa.runtime.host_calls import refuse_host_calls
from alpa.runtime.keys import draws, with_folded_keys
from alpa.runtime.markers import to_custom_calls
from alpa.runtime.planning import run_pass

for _file in (__file__, calls.__file__, keys.__file__, markers.__file__):
    source_info_util.register_exclusion(_file)  # Errors must show the user's lines.


_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors where Python code needs the number that an argument holds."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The result of a traced function: its functions, and its arrays by path."""

    tree: Any
    paths: tuple[tuple[Any, ...], ...]
    functions: tuple[Any, ...]
    """for each leaf, the function that it is, or None for an array"""
    keys: tuple[str | None, ...]
    """for each array, its kind of key, as `jax.random.key_impl` gives it"""


class Traced:
    """A function traced with arrays of the given types in place of a call's.

    Raises:
        TypeError: a result is not an array.
    """

    def __init__(self, fun: Callable[..., Any], call: Call, types: Sequence[LeafType]) -> None:
        name: str = getattr(fun, "__name__", "step")
        returned: list[Returned] = []
        impls: list[tuple[str | None, ...]] = []

        def flat(*arrays: Any) -> list[Any]:
            impls.append(tuple(map(_key_impl, arrays)))
            found, tree = jax.tree_util.tree_flatten_with_path(call.invoke(fun, arrays))
            given = [leaf for _, leaf in found]
            if not any(not _is_function(leaf) for leaf in given):
                raise TypeError(
                    f"{name} returns no array, so that there is nothing to compute; return the "
                    "arrays that it computes"
                )
            functions = tuple(leaf if _is_function(leaf) else None for leaf in given)
            results = [leaf for leaf in given if not _is_function(leaf)]
            paths = [("result", *path) for path, leaf in found if not _is_function(leaf)]
            _check_results(paths, results)
            returned.append(
                Returned(
                    tree=tree,
                    paths=tuple(paths),
                    functions=functions,
                    keys=tuple(map(_key_impl, results)),
                )
            )
            return results

        # JAX's errors must name the user's function and its place.
        signature = inspect.signature(flat)
        update_wrapper(flat, fun, updated=())
        flat.__name__, flat.__signature__ = name, signature
        structs = [type_.struct() for type_ in types]
        try:
            self.stages = jax.jit(flat, keep_unused=True).trace(*structs)
        except _READS_A_VALUE as error:
            error.args = (_with_labels(str(error), call),)
            raise
        self._fun = fun
        self._returned = returned[-1]
        self.key_impls = impls[-1]
        """for each argument, its kind of key, as `jax.random.key_impl` gives it"""

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return cast(ClosedJaxpr, self.stages.jaxpr)

    @cached_property
    def results(self) -> tuple[ResultLeaf, ...]:
        types = [
            LeafType(shape=a.shape, dtype=a.dtype, weak=a.weak_type) for a in self.jaxpr.out_avals
        ]
        return tuple(
            ResultLeaf(path=path, type=type_)
            for path, type_ in zip(self._returned.paths, types, strict=True)
        )

    def lower(
        self, platform: str, keys: tuple[int, ...] = (), other: Traced | None = None
    ) -> ir.Module:
        """Lowers it to a module with Alpa's markers and locations, in a context with our dialects.

        With `other`, the function at the other size, it also takes a folded version of each of
        `keys`, as `keys.with_folded_keys` describes.
        """
        stages = self.stages
        if other is not None and draws(self.jaxpr.jaxpr, other.jaxpr.jaxpr):
            stages = with_folded_keys(self.jaxpr, other.jaxpr, keys, self.key_impls)
        module = cast(ir.Module, stages.lower(lowering_platforms=(platform,)).compiler_ir())
        module = parse(bytecode(module))
        hide_computations(module)
        refuse_host_calls(module)
        to_custom_calls(module)
        if (code := getattr(inspect.unwrap(self._fun), "__code__", None)) is not None:
            place = ir.Location.file(code.co_filename, code.co_firstlineno, 1, module.context)
            main_function(module).operation.location = place
        return module

    def result(self, arrays: Sequence[Any]) -> Any:
        """Builds the function's result from these arrays; typed keys may be given as words."""
        typed = iter(
            [
                array if impl is None else _typed_key(array, impl)
                for array, impl in zip(arrays, self._returned.keys, strict=True)
            ]
        )
        functions = self._returned.functions
        leaves = [next(typed) if function is None else function for function in functions]
        return jax.tree.unflatten(self._returned.tree, leaves)


def _with_labels(message: str, call: Call) -> str:
    """JAX's message with the names of the caller's arrays, which it numbers, and what to do about
    numbers among them."""
    numbers: list[str] = []

    def named(found: re.Match[str]) -> str:
        leaf = call.arrays[int(found[1])]
        if leaf.type is not None and not leaf.type.shape:
            numbers.append(leaf.label)
        return leaf.label

    message = re.sub(r"\barrays\[(\d+)\]", named, message)
    if not numbers:
        return message
    return (
        f"{message}\n{' and '.join(dict.fromkeys(numbers))}: as in jax.jit, numbers in a tree are "
        "arrays in the step. If Python code reads one, pass it as a static argument "
        "(static_argnums), or keep it out of the tree: arrays, static = "
        "eqx.partition(model, eqx.is_array), and eqx.combine(arrays, static) in the step"
    )


def _typed_key(words: Any, impl: str) -> Any:
    """The key of its words, which may be sharded over a mesh; typed keys are unchanged."""
    if jnp.issubdtype(words.dtype, jax.dtypes.prng_key):
        return words
    sharding = getattr(words, "sharding", None)  # words in other processes have none here
    if isinstance(sharding, NamedSharding):
        words = jax.device_put(words, NamedSharding(sharding.mesh, PartitionSpec()))
    return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and not hasattr(leaf, "dtype")


def _key_impl(array: Any) -> str | None:
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return cast(str, jax.random.key_impl(array))


def _check_results(paths: Sequence[tuple[Any, ...]], results: Sequence[Any]) -> None:
    for path, value in zip(paths, results, strict=True):
        if not isinstance(
            value, jax.Array | np.ndarray | np.generic | bool | int | float | complex
        ):
            raise TypeError(
                f"{label(path)} is a {type(value).__name__}, not an array; return arrays and "
                "trees of them"
            )


class DataFlow:
    """The evidence of a program about its arguments, computed when first needed."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def nearest(self, result: int) -> Mapping[int, int]:
        """The arguments that a result is computed from element by element, with distances."""
        return nearest_arguments(self._graph, self._graph.returned[result])

    def classes(self) -> Mapping[tuple[int, int], int]:
        """Maps each argument and dimension to its class of dimensions that must be equal."""
        with populated(self._module) as rule_of:
            return tied_dims(body(main_function(self._module)), rule_of)

    def reads(self, number: int) -> bool:
        """Whether any computation uses an argument."""
        return bool(self._graph.users[number])

    def is_exact(self, dims: Mapping[int, int]) -> bool:
        """Whether the program is exact if these arguments are split in these dimensions.

        Some result must depend on their samples, and two micro-batches must compute what the whole
        batch computes. Random numbers are not recognised as samples' numbers here.
        """
        roles = [("batch", dims[n]) if n in dims else (None, None) for n in range(self._arguments)]
        context = relate(
            self._graph,
            roles,
            num_micro_batches=2,
            whole_is_known=False,
            sum_power=-1,
        )
        found = [context.at(self._graph.values[v]) for v in self._graph.returned]
        return any(it.kind != "same" for it in found) and not any(it.is_mixed for it in found)

    @property
    def _arguments(self) -> int:
        return len(self._traced.jaxpr.in_avals)

    @cached_property
    def _graph(self) -> Graph:
        return Graph.of(body(main_function(self._module)))

    @cached_property
    def _module(self) -> ir.Module:
        module = self._traced.lower("cpu")
        run_pass("simplify-trivial-ops", {}, module, Clock())
        scatter_apart(Graph.of(body(main_function(module))))
        return module


def depends_on(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """For each result, whether it depends on a marked argument.

    A loop or a branch counts as one op.
    """
    marked = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, JaxprLiteral) and atom in marked

    for eqn in jaxpr.eqns:
        flags = [is_marked(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr):
            outs = depends_on(inner.jaxpr, flags)
        else:
            outs = [any(flags)] * len(eqn.outvars)
        marked.update(var for var, flag in zip(eqn.outvars, outs, strict=True) if flag)
    return [is_marked(atom) for atom in jaxpr.outvars]
