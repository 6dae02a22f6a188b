"""A function traced for one call: what its arguments and results are, and its lowered module.

A step is traced at the whole batch, which says what comes back, and lowered at the size of one
micro-batch. The lowered module follows the contract for inputs of the compiler: every argument of
`@main` has an `alpa.role`, results have an `alpa.result`, and donated state is donated to its new
value. The arguments are the call's arrays in their order, typed keys as their words.

**Keys.** With several micro-batches, the program takes each key once more, folded with the number
of the micro-batch, as rows of a batch argument: forward and backward see the folded keys, the
update and keys that come back see those of the step (`tracing.with_folded_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import Argument, Result, ResultRole, Role, write_interface
from alpa.runtime.calls import Call, Leaf, LeafType
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.micro_batches import divisors
from alpa.runtime.step_roles import Declared, batch_leaves, result_role, state_pairs
from alpa.runtime.tracing import Nearest, Traced, depends_on

LossReduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a function, traced at the whole batch, and what its leaves are.

    `state` maps the number of each state argument to that of its new value; `batch` are the
    arguments that hold the samples, `batch_size` of them.
    """

    fun: Callable[..., Any]
    call: Call
    declared: Declared
    whole: Traced
    state: Mapping[int, int]
    batch: frozenset[int]
    batch_size: int | None

    @classmethod
    def of(cls, fun: Callable[..., Any], call: Call, declared: Declared, *, several: bool) -> Step:
        """Traces a function. `several` says that the batch has to be known.

        Raises:
            ValueError: the roles of the arguments cannot be told.
            TypeError: the result holds what is no array.
        """
        arrays = call.arrays
        whole = Traced(fun, call, [_type(leaf) for leaf in arrays])
        pairs = state_pairs(arrays, whole.results, declared, Nearest(whole))
        batch, size = batch_leaves(arrays, pairs.keys(), declared, several=several)
        return cls(
            fun=fun,
            call=call,
            declared=declared,
            whole=whole,
            state=pairs,
            batch=batch,
            batch_size=size,
        )

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "the function")

    def check_number(self, num_micro_batches: int) -> None:
        """Raises ValueError where the batch cannot be cut into so many equal parts."""
        size = self.batch_size
        if size is None or size % num_micro_batches == 0:
            return
        near = sorted(divisors(size), key=lambda n: abs(n - num_micro_batches))[:2]
        raise ValueError(
            f"a batch of {size} samples cannot be cut into {num_micro_batches} equal "
            f"micro-batches; {' and '.join(map(str, sorted(near)))} divide it"
        )

    def lower(
        self, num_micro_batches: int, loss_reduction: LossReduction, platform: str
    ) -> Lowered:
        """The step at the size of one of so many micro-batches.

        Raises:
            ValueError: the batch cannot be cut so, or a result neither stays nor grows with it.
        """
        self.check_number(num_micro_batches)
        if num_micro_batches == 1:
            return self._lowered(self.whole, (), 1, loss_reduction, platform)
        types = [
            _cut(_type(leaf), num_micro_batches) if n in self.batch else _type(leaf)
            for n, leaf in enumerate(self.call.arrays)
        ]
        small = Traced(self.fun, self.call, types)
        if [r.path for r in small.results] != [r.path for r in self.whole.results]:
            raise ValueError(
                f"{self.name} returns another tree for a micro-batch of "
                f"{(self.batch_size or 0) // num_micro_batches} samples than for the whole batch"
            )
        keys = tuple(n for n, type_ in enumerate(types) if type_.is_key and n not in self.batch)
        return self._lowered(small, keys, num_micro_batches, loss_reduction, platform)

    def _lowered(
        self,
        traced: Traced,
        keys: tuple[int, ...],
        number: int,
        loss_reduction: LossReduction,
        platform: str,
    ) -> Lowered:
        module = traced.lower(platform, keys, self.batch)
        arguments = [self._argument(n) for n in range(len(self.call.arrays))]
        arguments += [Argument(role="batch", batch_dim=0)] * len(keys)
        results = self._results(traced, number, loss_reduction)
        with module.context:
            write_interface(main_function(module), arguments, results)
        return Lowered(
            step=self, module=module, num_micro_batches=number, folded=keys, traced=traced
        )

    def _argument(self, number: int) -> Argument:
        leaf = self.call.arrays[number]
        donated = leaf.argument in self.declared.donated
        if number in self.state:
            alias = self.state[number] if donated else None
            return Argument(role="state", aliasing_output=alias)
        if number in self.batch:
            return Argument(role="batch", batch_dim=0)
        role: Role | None = "constant"
        if _type(leaf).is_key:
            role = "key"
        elif self.batch_size is None and self.declared.batch is None and _type(leaf).shape:
            role = None  # Perhaps the batch: the passes may find out.
        return Argument(role=role)

    def _results(self, traced: Traced, number: int, loss_reduction: LossReduction) -> list[Result]:
        old = {r: n for n, r in self.state.items()}
        batch = [n in self.batch for n in range(len(self.call.arrays))]
        depends = depends_on(traced.jaxpr.jaxpr, batch)
        roles: list[ResultRole | None] = []
        for r, (small, large) in enumerate(zip(traced.results, self.whole.results, strict=True)):
            if r in old:
                roles.append(ResultRole("state", old[r]))
            elif number == 1:
                roles.append(None)
            elif not depends[r]:
                roles.append(ResultRole("last"))
            else:
                roles.append(result_role(small, large.type, number, loss_reduction))
        return [Result(role=role) for role in roles]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A step as StableHLO, at the size of one of `num_micro_batches`.

    `folded` are the keys that the program takes once more, folded with the micro-batch's number.
    """

    step: Step
    module: ir.Module
    num_micro_batches: int
    folded: tuple[int, ...]
    traced: Traced

    def as_text(self) -> str:
        """The module, as `alpa-plan` reads it, with the locations that tell its gradients."""
        return cast(str, self.module.operation.get_asm(enable_debug_info=True))

    def compiler_ir(self) -> ir.Module:
        """The module itself."""
        return self.module

    def arguments(self, call: Call) -> list[Any]:
        """The program's arguments for a call that this step serves."""
        types = [_type(leaf) for leaf in self.step.call.arrays]
        impls = self.traced.key_impls
        arrays = [_raw(leaf.value, type_) for leaf, type_ in zip(call.arrays, types, strict=True)]
        fold = [
            _folded(impls[n], self.num_micro_batches)(jnp.asarray(arrays[n])) for n in self.folded
        ]
        return [*arrays, *fold]

    def result(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, made of the program's results."""
        return self.traced.result(arrays)


def _type(leaf: Leaf) -> LeafType:
    assert leaf.type is not None
    return leaf.type


def _cut(type_: LeafType, parts: int) -> LeafType:
    first, *others = type_.shape
    return LeafType(shape=(first // parts, *others), dtype=type_.dtype, weak=type_.weak)


@cache
def _folded(impl: str | None, count: int) -> Callable[[Any], jax.Array]:
    """A function from a key's words to `count` keys' words: the key folded with each number."""

    def fold(words: Any) -> jax.Array:
        key = words if impl is None else jax.random.wrap_key_data(words, impl=impl)
        folded = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count, dtype=jnp.uint32))
        return folded if impl is None else jax.random.key_data(folded)

    return jax.jit(fold)


def _raw(value: Any, type_: LeafType) -> Any:
    """An argument as the program takes it: a typed key's words, numpy's in jax's type."""
    if type_.is_typed_key:
        return jax.random.key_data(value)
    if isinstance(value, jax.Array | MeshArray):
        return value
    return np.asarray(value, type_.dtype)
