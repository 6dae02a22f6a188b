"""One call of a parallelised function: its arguments by name, its leaves by path and type.

Arguments have the names of the function's parameters, whether they are passed by position or not. A
leaf is an array for JAX, a random key, or a function: Equinox models hold activation functions as
leaves. Functions and static arguments are part of what is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from alpa.runtime.argument_checks import Placed
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.pjrt import ARRAY

SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)
"""Settings of JAX that change what a function computes, or whether it may."""

Path = tuple[Any, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LeafType:
    """The type of an array for JAX, without its elements."""

    shape: Shape
    dtype: Any
    weak: bool = False

    @cached_property
    def is_typed_key(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    @property
    def is_key(self) -> bool:
        """Whether it is one random key: typed, or the two words that `jax.random` accepts."""
        if self.is_typed_key:
            return self.shape == ()
        return self.shape == (2,) and self.dtype == np.uint32

    @property
    def strong(self) -> LeafType:
        """The type without its weakness, as a program has it."""
        return LeafType(shape=self.shape, dtype=self.dtype)

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)

    def __str__(self) -> str:
        weak = " (a Python number)" if self.weak else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{weak}"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of an argument. `path` begins with the argument's name."""

    argument: str
    path: Path
    value: Any
    remedy: str = "pass it as a static argument (static_argnums), or keep it out of the tree"
    """what to do if it is no array"""

    @property
    def label(self) -> str:
        return label(self.path)

    @cached_property
    def type(self) -> LeafType | None:
        """The leaf's type, None for a function. Raises TypeError for any other object."""
        value = self.value
        if isinstance(value, Tracer):
            raise TypeError(
                f"{self.label} is being traced: a parallelised function runs on whole meshes and "
                "cannot be called inside jax.jit, grad or vmap; call it outside, or use the plain "
                "function there"
            )
        if isinstance(value, jax.ShapeDtypeStruct | jax.Array | MeshArray | Placed):
            return _array_type(value)
        try:
            aval = jax.typeof(value)
        except TypeError as error:
            if callable(value):
                return None
            raise TypeError(
                f"{self.label} is {_shown(value)}, a {type(value).__name__}, not an array; "
                f"{self.remedy}"
            ) from error
        return LeafType(shape=aval.shape, dtype=aval.dtype, weak=aval.weak_type)


def _array_type(
    array: ShapedArray | jax.ShapeDtypeStruct | jax.Array | MeshArray | Placed,
) -> LeafType:
    """The type of an array of JAX; equal types are the same object, which compares at once."""
    return _leaf_type(array.shape, array.dtype, getattr(array, "weak_type", False))


@cache
def _leaf_type(shape: Shape, dtype: Any, weak: bool) -> LeafType:
    return LeafType(shape=shape, dtype=dtype, weak=weak)


@dataclass(frozen=True, kw_only=True)
class ResultLeaf:
    """One array of a result; `path` begins with the word `result`."""

    path: Path
    type: LeafType

    @property
    def label(self) -> str:
        return label(self.path)


def label(path: Path) -> str:
    """A path as Python writes it: `state.params['w']`."""
    return f"{path[0]}{jax.tree_util.keystr(path[1:])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]} ..."


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The names of a function's parameters, and which of them are special."""

    names: tuple[str, ...]
    rest: str
    keywords: frozenset[str] | None = frozenset()
    """of parameters that are passed by name; None if any name is accepted"""
    static: frozenset[str] = frozenset()
    donated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fun: Callable[..., Any]) -> Parameters:
        kinds = inspect.Parameter
        parameters = inspect.signature(fun).parameters.values()
        rest = [p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL]
        positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in positional)
        only = frozenset(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
        free = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
        return cls(
            names=names,
            rest=rest[0] if rest else "argument",
            keywords=None if free else only,
        )

    def name(self, number: int) -> str:
        """The name of a positional argument; negative numbers count from the last parameter."""
        if number < 0:
            number += len(self.names)
        return self.names[number] if number < len(self.names) else f"{self.rest}[{number}]"

    def select(self, option: str, chosen: Iterable[int | str]) -> frozenset[str]:
        """Resolves numbers and names to names. Raises ValueError if there is no such parameter."""
        names: set[str] = set()
        for one in chosen:
            if isinstance(one, str):
                known = {*self.names, self.rest, *(self.keywords or ())}
                if self.keywords is not None and one not in known:
                    raise ValueError(
                        f"{option} holds '{one}', but the function has no parameter of that name; "
                        f"it has {', '.join((*self.names, *sorted(self.keywords))) or 'none'}"
                    )
                names.add(one)
                continue
            if self.rest == "argument" and not -len(self.names) <= one < len(self.names):
                raise ValueError(
                    f"{option} holds {one}, but the function has {len(self.names)} positional "
                    f"parameters: {', '.join(self.names)}"
                )
            names.add(self.name(one))
        return frozenset(names)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call, flattened.

    `trees` are the structures of the non-static arguments; `values`, their leaves, are in their
    order.
    """

    positional: tuple[str, ...]
    trees: tuple[tuple[str, Any], ...]
    values: tuple[Any, ...]
    static: tuple[tuple[str, Hashable], ...]
    settings: tuple[Hashable, ...]
    """the values of `SETTINGS` at the call"""

    @classmethod
    def of(cls, parameters: Parameters, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """Flattens the arguments of a call. Raises TypeError for an invalid argument."""
        given = {parameters.name(number): value for number, value in enumerate(args)}
        if both := [name for name in kwargs if name in given]:
            raise TypeError(
                f"got multiple values for argument '{both[0]}': by position and by name; pass it "
                "once"
            )
        given |= kwargs
        trees: list[tuple[str, Any]] = []
        values: list[Any] = []
        static: list[tuple[str, Hashable]] = []
        for name, value in given.items():
            if name in parameters.static:
                static.append((name, _hashable(name, value)))
                continue
            found, tree = jax.tree.flatten(value)
            trees.append((name, tree))
            values += found
        return cls(
            positional=tuple(given)[: len(args)],
            trees=tuple(trees),
            values=tuple(values),
            static=tuple(static),
            settings=tuple(getattr(jax.config, name) for name in SETTINGS),
        )

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves with their paths, which a call that is planned already does not need."""
        left = iter(self.values)
        leaves: list[Leaf] = []
        for name, tree in self.trees:
            given = jax.tree.unflatten(tree, [next(left) for _ in range(tree.num_leaves)])
            found, _ = jax.tree_util.tree_flatten_with_path(given)
            leaves += [Leaf(argument=name, path=(name, *path), value=leaf) for path, leaf in found]
        return tuple(leaves)

    @cached_property
    def types(self) -> tuple[LeafType | None, ...]:
        """The types of the leaves, None for functions. Raises TypeError as `Leaf.type` does."""
        return tuple(self._type(number) for number in range(len(self.values)))

    def _type(self, number: int) -> LeafType | None:
        value = self.values[number]
        if isinstance(value, ARRAY | MeshArray | Placed):
            return _array_type(value)
        if isinstance(value, np.ndarray | np.generic):
            return _array_type(jax.typeof(value))
        return self.leaves[number].type

    @cached_property
    def marks(self) -> list[Any]:
        """A mark for each leaf: equal marks mean equal types, or the same function.

        The arrays that a step returns share one `aval` object from step to step, so comparing marks
        is fast, and `types` is not computed.
        """
        return [
            value.aval if type(value) is ARRAY else self._mark(number)
            for number, value in enumerate(self.values)
        ]

    def _mark(self, number: int) -> Any:
        type_ = self._type(number)
        return self.values[number] if type_ is None else type_

    @cached_property
    def arrays(self) -> tuple[Leaf, ...]:
        """The leaves except functions: the inputs of the compiled program."""
        return tuple(leaf for leaf in self.leaves if leaf.type is not None)

    def key(self, strong: Collection[int] = ()) -> Hashable:
        """A key that is equal for calls that the same program serves.

        `strong` are the numbers of arrays that may be weakly typed or not.
        """
        pairs = zip(self.values, self.types, strict=True)
        functions = tuple(value for value, type_ in pairs if type_ is None)
        types = self.types
        if strong:
            numbers = count()
            types = tuple(
                type_.strong if type_ is not None and next(numbers) in strong else type_
                for type_ in types
            )
        return (self.positional, self.trees, self.static, self.settings, functions, types)

    def abstract(self) -> Call:
        """The call with shapes instead of arrays, which can then be freed."""
        pairs = zip(self.values, self.types, strict=True)
        values = (value if type_ is None else type_.struct() for value, type_ in pairs)
        return replace(self, values=tuple(values))

    def invoke(self, fun: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """Calls the function with other arrays in place of these."""
        left = iter(arrays)
        pairs = zip(self.values, self.types, strict=True)
        leaves = iter([value if type_ is None else next(left) for value, type_ in pairs])
        given: dict[str, Any] = dict(self.static)
        for name, tree in self.trees:
            given[name] = jax.tree.unflatten(tree, [next(leaves) for _ in range(tree.num_leaves)])
        args = [given.pop(name) for name in self.positional]
        return fun(*args, **given)


def _hashable(name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"the static argument {name} is a {type(value).__name__}, which has no hash; static "
            "arguments are part of what is compiled and must be hashable"
        ) from error
    return value
