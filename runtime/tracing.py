"""A function traced by jax for one call: its jaxpr, its results by path, its module.

Functions among the leaves of arguments and results pass by. Typed keys are arguments as they are;
in the module they are their words.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import Literal as JaxprLiteral
from jax.sharding import NamedSharding, PartitionSpec

from alpa import passes
from alpa.dialects import body, ir, main_function, parse
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.roles import nearest_arguments
from alpa.runtime import calls, markers
from alpa.runtime.calls import Call, LeafType, ResultLeaf, label
from alpa.runtime.markers import is_gradient_mark, to_custom_calls

for _file in (__file__, calls.__file__, markers.__file__):
    source_info_util.register_exclusion(_file)  # Errors are to show the user's lines.


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The result of a traced function: functions in it stay, arrays are by their paths."""

    tree: Any
    paths: tuple[tuple[Any, ...], ...]
    functions: tuple[Any, ...]
    """for each leaf the function that it is, or None for an array"""
    keys: tuple[str | None, ...]
    """for each array the kind of key that it is, as `jax.random.key_impl` says"""


class Traced:
    """A function traced with arrays of the types in the place of a call's.

    Raises:
        TypeError: the result holds what is no array.
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
                    f"{name} returns no array, so that there is nothing to compute; return what it "
                    "is called for"
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

        # What jax says of an error is to name the user's function and its place.
        signature = inspect.signature(flat)
        update_wrapper(flat, fun, updated=())
        flat.__name__, flat.__signature__ = name, signature
        structs = [type_.struct() for type_ in types]
        self.stages = jax.jit(flat, keep_unused=True).trace(*structs)
        self._fun = fun
        self._returned = returned[-1]
        self.key_impls = impls[-1]
        """for each argument the kind of key that it is, as `jax.random.key_impl` says"""

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return cast(ClosedJaxpr, self.stages.jaxpr)

    @cached_property
    def results(self) -> tuple[ResultLeaf, ...]:
        types = [LeafType(shape=a.shape, dtype=a.dtype) for a in self.jaxpr.out_avals]
        return tuple(
            ResultLeaf(path=path, type=type_)
            for path, type_ in zip(self._returned.paths, types, strict=True)
        )

    def lower(
        self, platform: str, keys: tuple[int, ...] = (), batch: Collection[int] = ()
    ) -> ir.Module:
        """Its module, in a context that has our dialects, with our markers and its locations.

        It takes a folded version of each of `keys`, too, as `with_folded_keys` says.
        """
        stages = with_folded_keys(self, keys, batch) if keys else self.stages
        module = cast(ir.Module, stages.lower(lowering_platforms=(platform,)).compiler_ir())
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        module = parse(buffer.getvalue())
        to_custom_calls(module)
        if (code := getattr(inspect.unwrap(self._fun), "__code__", None)) is not None:
            place = ir.Location.file(code.co_filename, code.co_firstlineno, 1, module.context)
            main_function(module).operation.location = place
        return module

    def result(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, of these arrays; typed keys may be given as their words."""
        typed = iter(
            [
                array if impl is None else _typed_key(array, impl)
                for array, impl in zip(arrays, self._returned.keys, strict=True)
            ]
        )
        functions = self._returned.functions
        leaves = [next(typed) if function is None else function for function in functions]
        return jax.tree.unflatten(self._returned.tree, leaves)


def _typed_key(words: Any, impl: str) -> Any:
    """The key of its words, which may be split over a mesh; what is a typed key already stays."""
    if jnp.issubdtype(words.dtype, jax.dtypes.prng_key):
        return words
    if isinstance(words, jax.Array) and isinstance(words.sharding, NamedSharding):
        words = jax.device_put(words, NamedSharding(words.sharding.mesh, PartitionSpec()))
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
                f"{label(path)} is a {type(value).__name__}, which is no array; return arrays and "
                "trees of them"
            )


class Nearest:
    """The data flow from arguments to results, found when it is first asked for."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def __call__(self, result: int) -> Mapping[int, int]:
        return nearest_arguments(self._graph, self._graph.returned[result])

    @cached_property
    def _graph(self) -> Graph:
        self._module = self._traced.lower("cpu")
        passes.run(self._module, "simplify-trivial-ops", on_remark=lambda *_: None)
        return Graph.of(body(main_function(self._module)))


def with_folded_keys(
    traced: Traced, keys: tuple[int, ...], batch: Collection[int]
) -> jax.stages.Traced:
    """The traced function with a row of folded keys for each key, after its arguments.

    What depends on the batch arguments is computed with the folded keys, up to the gradients that
    `alpa.grad` marks. What follows them is the update, of which there is one per step: it sees the
    keys as they are given, and so does what depends on no batch, as the keys that come back.
    """
    avals = traced.jaxpr.in_avals
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals
    ]

    def raw(n: int) -> jax.ShapeDtypeStruct:
        if traced.key_impls[n] is None:
            return structs[n]
        return cast(jax.ShapeDtypeStruct, jax.eval_shape(jax.random.key_data, structs[n]))

    rows = [jax.ShapeDtypeStruct((1, *raw(n).shape), np.uint32) for n in keys]

    def with_keys(*arguments: Any) -> list[Any]:
        given = [
            _Versions(array, array, in_batch=n in batch)
            for n, array in enumerate(arguments[: len(structs)])
        ]
        for n, row in zip(keys, arguments[len(structs) :], strict=True):
            impl = traced.key_impls[n]
            folded = row[0] if impl is None else jax.random.wrap_key_data(row[0], impl=impl)
            given[n] = _Versions(folded, given[n].step)
        return [result.final for result in _both_versions(traced.jaxpr, given)]

    return jax.jit(with_keys, keep_unused=True).trace(*structs, *rows)


@dataclass(frozen=True)
class _Versions:
    """A value of a micro-batch and one of the step, which are the same where no key tells them
    apart, or where there is none of the step."""

    micro: Any
    step: Any
    in_batch: bool = False
    in_update: bool = False

    @property
    def final(self) -> Any:
        """The one that the function returns."""
        return self.micro if self.in_batch and not self.in_update else self.step


def _both_versions(jaxpr: ClosedJaxpr, given: Sequence[_Versions]) -> list[_Versions]:
    """The results of a jaxpr in both versions; what is not used is left to dead code removal."""
    known: dict[Any, _Versions] = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        known[var] = _Versions(const, const)

    def read(atom: Any) -> _Versions:
        if isinstance(atom, JaxprLiteral):
            return _Versions(atom.val, atom.val)
        return known[atom]

    for eqn in jaxpr.jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if (inner := _called(eqn)) is not None:
            with _named_as(eqn):
                results = _both_versions(inner, inputs)
        else:
            run = _as_function(jaxpr.jaxpr, eqn)
            in_batch = any(value.in_batch for value in inputs)
            in_update = any(value.in_update for value in inputs) or is_gradient_mark(eqn)
            micro = step = run([value.micro for value in inputs])
            same = all(value.micro is value.step for value in inputs)
            if not same and (in_update or not in_batch):
                step = run([value.step for value in inputs])
            results = [
                _Versions(a, b, in_batch, in_update) for a, b in zip(micro, step, strict=True)
            ]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _named_as(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Gives what is traced inside the name of an equation, such as `transpose(jvp())`."""
    name = str(eqn.source_info.name_stack)
    return jax.named_scope(name) if name else nullcontext()


def _as_function(jaxpr: Jaxpr, eqn: JaxprEqn) -> Callable[[Sequence[Any]], list[Any]]:
    """One equation of a jaxpr, from the values of its operands to its results."""
    operands = dict.fromkeys(a for a in eqn.invars if not isinstance(a, JaxprLiteral))
    alone = jaxpr.replace(constvars=[], invars=[*operands], outvars=eqn.outvars, eqns=[eqn])
    run = jaxpr_as_fun(ClosedJaxpr(alone, ()))

    def call(values: Sequence[Any]) -> list[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        by_var = {a: value for a, value in pairs if not isinstance(a, JaxprLiteral)}
        return list(run(*by_var.values()))

    return call


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a function that is jitted inside."""
    inner = eqn.params.get("jaxpr")
    called = eqn.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr)
    return inner if called else None


def depends_on(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """For each result whether it depends on an argument that is marked.

    A loop or a branch counts as one op.
    """
    marked = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, JaxprLiteral) and atom in marked

    for eqn in jaxpr.eqns:
        flags = [is_marked(atom) for atom in eqn.invars]
        if (inner := _called(eqn)) is not None:
            outs = depends_on(inner.jaxpr, flags)
        else:
            outs = [any(flags)] * len(eqn.outvars)
        marked.update(var for var, flag in zip(eqn.outvars, outs, strict=True) if flag)
    return [is_marked(atom) for atom in jaxpr.outvars]
