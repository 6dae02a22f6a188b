"""A function traced for one call: its arguments, its results, and its lowered module.

A step is traced at the whole batch, which gives the results, and lowered at the size of one
micro-batch. The lowered module is valid compiler input: each argument of `@main` has an
`alpa.role`, results have an `alpa.result`, and donated state is donated to its new value. The
arguments are the call's arrays in order; typed keys are passed as their words.

**Several micro-batches.** The step is lowered for both sizes, and the ops of the small program
record how the large one differs (`micro_batches.whole`). The passes use this to prove that both
compute the same. If a key draws numbers for samples, the program takes it a second time, folded
with the number of the micro-batch, as rows of a batch argument (`runtime/keys.py`). If
micro-batches need counts of the whole batch, the program takes arrays of samples a second time, in
one piece (`passes/micro_batches/whole_numbers.py`).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import (
    MICRO_BATCHES,
    WHOLE,
    Argument,
    Result,
    ResultRole,
    Role,
    write_interface,
)
from alpa.dialects.records import i64
from alpa.passes.analysis.micro_batches.resize import resize
from alpa.passes.analysis.micro_batches.whole import MisalignedError, align
from alpa.passes.micro_batches.update_numbers import number_updates_by_sample
from alpa.passes.micro_batches.whole_numbers import read_whole_numbers
from alpa.passes.pipelines.diagnostics import place_of
from alpa.passes.simplify.gradients import mark_gradients
from alpa.passes.simplify.inline import inline_calls
from alpa.runtime.argument_checks import Placed
from alpa.runtime.calls import Call, Leaf, LeafType, ResultLeaf
from alpa.runtime.keys import drawn_from
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.micro_batches import indivisible
from alpa.runtime.pjrt import ARRAY
from alpa.runtime.step_roles import Declared, find_batch, result_role, state_pairs
from alpa.runtime.tracing import DataFlow, Traced, depends_on

_SHOWN = 6

_AT_ONE_SIZE = (AssertionError, IndexError, TypeError, ValueError, ZeroDivisionError)
"""Exceptions of functions that cannot be traced with other shapes."""

LossReduction = Literal["mean", "sum"]
MicroBatches = Literal["exact", "independent"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a function, traced at the whole batch, with the roles of its leaves.

    `state` maps the number of each state argument to the number of its new value. `batch` maps each
    argument that holds samples to their dimension, and `batch_size` is their number. `keys` are
    random keys. `reasons` explain the roles of arguments.
    """

    fun: Callable[..., Any]
    call: Call
    declared: Declared
    whole: Traced
    state: Mapping[int, int]
    keys: frozenset[int]
    batch: Mapping[int, int]
    batch_size: int | None
    reasons: Mapping[int, str]
    micro_batches: MicroBatches

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        call: Call,
        declared: Declared,
        *,
        several: bool,
        micro_batches: MicroBatches = "exact",
    ) -> Step:
        """Traces a function. `several` requires a batch.

        Raises:
            ValueError: the roles of the arguments are ambiguous.
            TypeError: a result is not an array.
        """
        arrays = call.arrays
        whole = Traced(fun, call, [_type(leaf) for leaf in arrays])
        flow = DataFlow(whole)
        pairs = state_pairs(arrays, whole.results, declared, flow.nearest)
        used = drawn_from(whole.jaxpr.jaxpr)
        keys = frozenset(n for n, leaf in enumerate(arrays) if _type(leaf).is_key and used[n])
        batch = find_batch(arrays, pairs.keys(), declared, keys, flow, several=several)
        pairs = {n: r for n, r in pairs.items() if n not in batch.dims}
        return cls(
            fun=fun,
            call=call,
            declared=declared,
            whole=whole,
            state=pairs,
            keys=keys,
            batch=batch.dims,
            batch_size=batch.size,
            reasons=batch.reasons,
            micro_batches=micro_batches,
        )

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return getattr(self.fun, "__name__", "the function")

    def arrays(self, call: Call) -> Sequence[Any]:
        """The values of a call that this step serves, without functions."""
        if len(self._numbers) == len(call.values):
            return call.values
        return [call.values[number] for number in self._numbers]

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of the leaves that are arrays."""
        return [number for number, type_ in enumerate(self.call.types) if type_ is not None]

    def explanation(self) -> str:
        """Describes the role of each argument: one line per role and reason."""
        groups: dict[tuple[str, str], list[int]] = {}
        for n in range(len(self.call.arrays)):
            groups.setdefault(self._role_and_reason(n), []).append(n)
        lines = [f"arguments of {self.name}"]
        for (role, reason), numbers in groups.items():
            labels = [self.call.arrays[n].label for n in numbers]
            more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
            lines.append(f"  {role}: {', '.join(labels[:_SHOWN])}{more}: {reason}")
        return "\n".join(lines)

    def _role_and_reason(self, n: int) -> tuple[str, str]:
        leaf = self.call.arrays[n]
        said = self.declared
        if n in self.state:
            if n in self.keys:
                role = "state, a random key"
            else:
                role = "state"
            if leaf.argument in (said.state or ()):
                return role, "state_argnums names it, and it has a new value"
            if leaf.argument in said.donated:
                return role, "it is donated and has a new value"
            return role, "a result is computed from it element by element"
        if n in self.batch:
            reason = self.reasons.get(n, "the only arrays with samples that are not state")
            return f"batch, cut in dimension {self.batch[n]}", reason
        if n in self.keys:
            return "random key", "random numbers are drawn from it"
        if leaf.argument in said.donated:
            return "constant", "it is donated and has no new value"
        if not _type(leaf).shape:
            return "constant", "a scalar without a new value"
        return "constant", self.reasons.get(n, "it shares no dimension with the samples")

    def check_number(self, num_micro_batches: int) -> None:
        """Raises ValueError if the batch cannot be split into so many equal parts."""
        size = self.batch_size
        if size is None or size % num_micro_batches == 0:
            return
        said = ""
        if self.declared.batch is None:
            n, dim = next(iter(self.batch.items()))
            said = (
                f". The samples were found in dimension {dim} of "
                f"{self.call.arrays[n].label}; if that is wrong, name the arguments that hold them "
                "in batch_argnums"
            )
        raise ValueError(f"{indivisible(size, num_micro_batches)}{said}")

    def lower(
        self, num_micro_batches: int, loss_reduction: LossReduction, platform: str
    ) -> Lowered:
        """Lowers the step at the size of one of `num_micro_batches`.

        Raises:
            ValueError: the batch cannot be split, or a result is neither constant in size nor
                proportional to the batch.
        """
        self.check_number(num_micro_batches)
        if num_micro_batches == 1:
            module = self.whole.lower(platform)
            return self._lowered(self.whole, module, (), 1, loss_reduction)
        samples = (self.batch_size or 0) // num_micro_batches
        if samples == 1:
            traced, other = self.whole, self.traced(2 * num_micro_batches)
        else:
            traced, other = self.traced(samples), self.whole
        if [r.path for r in traced.results] != [r.path for r in other.results]:
            raise ValueError(
                f"{self.name} returns a different tree for a micro-batch of {samples} samples than "
                "for the whole batch"
            )
        drawn = drawn_from(traced.jaxpr.jaxpr, other.jaxpr.jaxpr)
        keys = tuple(n for n in sorted(self.keys) if drawn[n] and n not in self.batch)
        module = traced.lower(platform, keys, other)
        if samples == 1 or self.micro_batches == "exact":
            self._align(module, other.lower(platform, keys, traced), num_micro_batches)
        return self._lowered(traced, module, keys, num_micro_batches, loss_reduction)

    def traced(self, samples: int) -> Traced:
        """Traces the function at another number of samples.

        Raises:
            ValueError: the function can be traced only at the whole batch.
        """
        types = [
            _with_samples(_type(leaf), samples, self.batch[n]) if n in self.batch else _type(leaf)
            for n, leaf in enumerate(self.call.arrays)
        ]
        try:
            return Traced(self.fun, self.call, types)
        except _AT_ONE_SIZE as error:
            cut = ", ".join(self.call.arrays[n].label for n in self.batch)
            raise ValueError(
                f"{self._place(error)}{self.name} cannot be traced with {samples} of its "
                f"{self.batch_size} samples: {type(error).__name__}: {error}\nSamples are taken "
                f"from {cut}. If other arguments hold samples, or these do not, name the right "
                "ones in batch_argnums; if the function works at one size only, plan with 1 "
                "micro-batch"
            ) from error

    def _place(self, error: Exception) -> str:
        """The place in the user's file that raised an error, if any."""
        code = getattr(inspect.unwrap(self.fun), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        mine = [it for it in frames if code is not None and it.filename == code.co_filename]
        return f"{mine[-1].filename}:{mine[-1].lineno}: " if mine else ""

    def _lowered(
        self,
        traced: Traced,
        module: ir.Module,
        keys: tuple[int, ...],
        number: int,
        loss_reduction: LossReduction,
    ) -> Lowered:
        arguments = [self._argument(n) for n in range(len(self.call.arrays))]
        arguments += [Argument(role="batch", batch_dim=0)] * len(keys)
        results = self._results(traced, module, number, loss_reduction)
        main = main_function(module)
        with module.context:
            write_interface(main, arguments, results)
            # The traced function has other names for the caller's arrays.
            for leaf, argument in zip(self.call.arrays, main.arguments, strict=False):
                argument.set_location(ir.Location.name(leaf.label))
            # The names exist at this point; the passes rely on markers instead.
            inline_calls(module, main, keeps_loops=True)
            mark_gradients(body(main))
            if number > 1:
                mode = ir.StringAttr.get(self.micro_batches)
                module.operation.attributes[MICRO_BATCHES] = mode
            whole: tuple[int, ...] = ()
            if number > 1 and self.micro_batches == "exact":
                number_updates_by_sample(main)
                whole = read_whole_numbers(main, arguments, sorted(self.batch), number)
            given = list(main.arguments)[len(main.arguments) - len(whole) :]
            for n, argument in zip(whole, given, strict=True):
                label = f"{self.call.arrays[n].label} of the whole batch"
                argument.set_location(ir.Location.name(label))
        return Lowered(
            step=self,
            module=module,
            num_micro_batches=number,
            folded=keys,
            whole=whole,
            traced=traced,
        )

    def _align(self, module: ir.Module, other: ir.Module, number: int) -> None:
        """Records on the ops of a module how they differ for the whole batch; inlines calls.

        If a micro-batch has one sample, `module` is that of the whole batch and `other` that of
        twice as many samples. The module then becomes that of one sample.

        Raises:
            ValueError: the function has different operations for the whole batch.
        """
        for each in (module, other):
            with each.context:
                inline_calls(each, main_function(each), keeps_loops=True)
        ours, theirs = main_function(module), main_function(other)
        try:
            if number == self.batch_size:
                text = cast(str, module.operation.get_asm(print_generic_op_form=True))
                whole = ir.Module.parse(text, other.context)
                resize(ours, theirs, (number, 2 * number), 1)
                theirs = main_function(whole)
            if self.micro_batches == "exact":
                align(body(ours), body(theirs))
        except MisalignedError as error:
            raise ValueError(f"{place_of(error.location)}: {self.name}: {error}") from None
        if self.micro_batches == "exact":
            with module.context:
                module.operation.attributes[WHOLE] = i64(number)

    def _argument(self, number: int) -> Argument:
        leaf = self.call.arrays[number]
        donated = leaf.argument in self.declared.donated
        if number in self.state:
            alias = self.state[number] if donated else None
            return Argument(role="state", aliasing_output=alias)
        if number in self.batch:
            return Argument(role="batch", batch_dim=self.batch[number])
        role: Role | None = "constant"
        if number in self.keys:
            role = "key"
        elif self.batch_size is None and self.declared.batch is None and _type(leaf).shape:
            role = None  # Possibly the batch; the passes decide.
        return Argument(role=role)

    def _results(
        self, traced: Traced, module: ir.Module, number: int, loss_reduction: LossReduction
    ) -> list[Result]:
        old = {r: n for n, r in self.state.items()}
        batch = [n in self.batch for n in range(len(self.call.arrays))]
        depends = depends_on(traced.jaxpr.jaxpr, batch)
        roles: list[ResultRole | None] = []
        types = main_function(module).type.results
        for r, (small, large) in enumerate(zip(traced.results, self.whole.results, strict=True)):
            if r in old:
                roles.append(ResultRole("state", old[r]))
            elif number == 1 or self.micro_batches == "exact":
                roles.append(None)
            elif not depends[r]:
                roles.append(ResultRole("last"))
            else:
                # Only the module exists for one sample: the function was traced for more.
                shape = _unkeyed(small, tuple(ir.RankedTensorType(types[r]).shape))
                own = replace(small, type=replace(small.type, shape=shape))
                roles.append(result_role(own, large.type, number, loss_reduction))
        return [Result(role=role) for role in roles]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A step as StableHLO, at the size of one of `num_micro_batches`.

    `folded` are the keys that the program takes a second time, folded with the micro-batch number.
    `whole` are the arrays of samples that it takes a second time, in one piece.
    """

    step: Step
    module: ir.Module
    num_micro_batches: int
    folded: tuple[int, ...]
    whole: tuple[int, ...]
    traced: Traced

    def as_text(self) -> str:
        """The module as text for `alpa-plan`, with the locations that identify gradients."""
        return cast(str, self.module.operation.get_asm(enable_debug_info=True))

    def compiler_ir(self) -> ir.Module:
        """The module itself."""
        return self.module

    def argument(self, number: int, value: Any) -> Any:
        """Returns an array of a call as the program takes it."""
        return _raw(value, self._types[number])

    def arguments(self, call: Call) -> list[Any]:
        """Returns the program's arguments for a call that this step serves."""
        impls = self.traced.key_impls
        arrays = [
            value if type(value) is ARRAY else _raw(value, type_)
            for value, type_ in zip(self.step.arrays(call), self._types, strict=True)
        ]
        fold = [
            _folded(impls[n], self.num_micro_batches)(jnp.asarray(arrays[n])) for n in self.folded
        ]
        return [*arrays, *fold, *(arrays[n] for n in self.whole)]

    @cached_property
    def _types(self) -> list[LeafType]:
        return [_type(leaf) for leaf in self.step.call.arrays]

    def result(self, arrays: Sequence[Any]) -> Any:
        """Builds the function's result from the program's results."""
        return self.traced.result(arrays)


def _type(leaf: Leaf) -> LeafType:
    assert leaf.type is not None
    return leaf.type


def _with_samples(type_: LeafType, samples: int, dim: int) -> LeafType:
    shape = tuple(samples if d == dim else size for d, size in enumerate(type_.shape))
    return LeafType(shape=shape, dtype=type_.dtype, weak=type_.weak)


def _unkeyed(result: ResultLeaf, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a result in a module, where a typed key is its words."""
    return shape[:-1] if result.type.is_typed_key else shape


@cache
def _folded(impl: str | None, count: int) -> Callable[[Any], jax.Array]:
    """Returns a function from a key's words to the words of the key folded with each number."""

    def fold(words: Any) -> jax.Array:
        key = words if impl is None else jax.random.wrap_key_data(words, impl=impl)
        folded = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count, dtype=jnp.uint32))
        return folded if impl is None else jax.random.key_data(folded)

    return jax.jit(fold)


def _raw(value: Any, type_: LeafType) -> Any:
    """An argument as the program takes it: the words of a typed key, JAX's type for numpy's."""
    if type_.is_typed_key:
        return jax.random.key_data(value)
    if isinstance(value, jax.Array | MeshArray | Placed):
        return value
    return np.asarray(value, type_.dtype)
