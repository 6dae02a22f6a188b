"""Plain JAX that loops over micro-batches, as a plan does.

This is the reference for a step that treats micro-batches as batches of their own, or that draws
different random numbers in each. One step at the whole batch computes something else in these
cases.

The step's jaxpr is evaluated once per micro-batch, up to the gradients that `alpa.grad` marks. The
gradients are averaged, and the update after them is computed once. Random numbers for samples are
drawn from the key folded with the number of the micro-batch. Numbers that samples share, the
update, and returned keys use the given key. State that the forward part writes, counters of running
averages among it, is carried from one micro-batch to the next. Results are combined by their
`alpa.result`. A scalar of the forward part that the update reads, such as the loss, is averaged,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import Literal as JaxprLiteral

from alpa.dialects import body, main_function
from alpa.dialects.attributes import ResultRole, read_results
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step
from alpa.runtime.keys import equations, is_shared_draw
from alpa.runtime.markers import is_gradient_mark
from alpa.runtime.step import LossReduction, Lowered

_FORM = "give compare_with_jax(..., reference=f) a function that computes the step in plain JAX"


def looped(lowered: Lowered, loss_reduction: LossReduction) -> Callable[..., list[Any]]:
    """Returns a function of JAX from a step's arrays, at the whole batch, to its results.

    Arguments and results are those of the traced function, with typed keys.

    Raises:
        ValueError: the function marks no gradients, or its update reads an array that differs
            between the micro-batches.
    """
    step, number = lowered.step, lowered.num_micro_batches
    jaxpr = lowered.traced.jaxpr
    roles = [result.role for result in read_results(main_function(lowered.module))]
    if step.state and not _marks_gradients(jaxpr.jaxpr):
        raise ValueError(
            f"{step.name} computes its {number} micro-batches one by one, and marks no gradients, "
            f"so that plain JAX cannot separate its update; use alpa.grad, or {_FORM}"
        )

    main = main_function(lowered.module)
    graph = Graph.of(body(main))
    exact = step.micro_batches == "exact"
    counters = split_step(graph, infer_roles(main, graph), exact=exact, several=True).counters

    def run(*arrays: Any) -> list[Any]:
        now, shared = list(arrays), _Shared(name=step.name, reduction=loss_reduction)
        runs: list[list[_Value]] = []
        for m in range(number):
            given = [_Value(array, array) for array in now]
            for n in step.batch:
                rows = now[n].shape[0] // number
                part = now[n][m * rows : (m + 1) * rows]
                given[n] = _Value(part, part, in_batch=True)
            for n in lowered.folded:
                given[n] = _Value(jax.random.fold_in(now[n], m), now[n])
            shared.begin(is_last=m == number - 1)
            results = _evaluated(jaxpr, step.whole.jaxpr, given, shared)
            runs.append(results)
            for argument, result in step.state.items():
                if results[result].is_forward or argument in counters:
                    now[argument] = results[result].micro
        return [
            _combined(role, [results[n] for results in runs], loss_reduction)
            for n, role in enumerate(roles)
        ]

    return run


@dataclass(frozen=True)
class _Value:
    """A value from folded keys and from the step's keys; equal if no key is involved."""

    micro: Any
    step: Any
    in_batch: bool = False
    in_update: bool = False

    @property
    def is_forward(self) -> bool:
        """Whether each micro-batch has its own version."""
        return self.in_batch and not self.in_update


@dataclass(kw_only=True)
class _Shared:
    """The state that micro-batches share: sums of the update's inputs, in order."""

    name: str
    reduction: LossReduction
    sums: list[Any] = field(default_factory=list)
    runs: int = 0
    is_last: bool = False
    _next: int = 0

    def begin(self, *, is_last: bool) -> None:
        """Starts a micro-batch."""
        self.is_last, self._next = is_last, 0
        self.runs += 1

    def total(self, value: Any) -> Any:
        """The mean over all micro-batches, in the last one; before that, an unused value."""
        wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        if self.runs == 1:
            self.sums.append(wide)
        else:
            self.sums[self._next] = self.sums[self._next] + wide
        total = self.sums[self._next]
        self._next += 1
        if not self.is_last:
            return value
        return (total if self.reduction == "sum" else total / self.runs).astype(value.dtype)

    def crossing(self, value: _Value) -> _Value:
        """A value of the forward part as the update reads it. Raises ValueError."""
        array = value.micro
        if array.shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"the update of {self.name} reads {array.dtype}{list(array.shape)} of the forward "
                f"part, which differs between the micro-batches; {_FORM}"
            )
        total = self.total(array)
        return _Value(total, total, in_batch=True, in_update=True)


def _evaluated(
    jaxpr: ClosedJaxpr, whole: ClosedJaxpr, given: Sequence[_Value], shared: _Shared
) -> list[_Value]:
    """The results of a jaxpr for one micro-batch. XLA removes unused ones."""
    known: dict[Any, _Value] = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        known[var] = _Value(const, const)

    def read(atom: Any) -> _Value:
        return _Value(atom.val, atom.val) if isinstance(atom, JaxprLiteral) else known[atom]

    for eqn, counterpart in equations(jaxpr.jaxpr, whole.jaxpr):
        inputs = [read(atom) for atom in eqn.invars]
        if (inner := _called(eqn)) is not None:
            other = _called(counterpart)
            assert other is not None
            results = _evaluated(inner, other, inputs, shared)
        elif is_shared_draw(eqn, counterpart):
            given_keys = [_Value(value.step, value.step) for value in inputs]
            results = _applied(jaxpr.jaxpr, eqn, given_keys, shared)
        elif is_gradient_mark(eqn):
            total = shared.total(inputs[0].micro)
            results = [_Value(total, total, in_batch=True, in_update=True)]
        else:
            results = _applied(jaxpr.jaxpr, eqn, inputs, shared)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _applied(
    jaxpr: Jaxpr, eqn: JaxprEqn, inputs: Sequence[_Value], shared: _Shared
) -> list[_Value]:
    in_batch = any(value.in_batch for value in inputs)
    in_update = any(value.in_update for value in inputs)
    if in_update:
        inputs = [shared.crossing(value) if value.is_forward else value for value in inputs]
    operands = {a: v for a, v in zip(eqn.invars, inputs, strict=True) if not _is_literal(a)}
    alone = jaxpr.replace(constvars=[], invars=[*operands], outvars=eqn.outvars, eqns=[eqn])
    run = jaxpr_as_fun(ClosedJaxpr(alone, ()))
    micro = step = run(*(value.micro for value in operands.values()))
    same = all(value.micro is value.step for value in inputs)
    if not same and (in_update or not in_batch):
        step = run(*(value.step for value in operands.values()))
    return [_Value(a, b, in_batch, in_update) for a, b in zip(micro, step, strict=True)]


def _combined(role: ResultRole | None, values: Sequence[_Value], reduction: LossReduction) -> Any:
    """Combines the results of the micro-batches into one result."""
    last = values[-1]
    if not last.is_forward:
        return last.step
    arrays = [value.micro for value in values]
    if role is None or role.kind in ("last", "state"):
        return arrays[-1]
    if role.kind == "concat":
        return jnp.concatenate(arrays, axis=role.index)
    kind = arrays[0].dtype
    wide = jnp.promote_types(kind, jnp.float32) if jnp.issubdtype(kind, jnp.inexact) else kind
    total = jnp.stack([array.astype(wide) for array in arrays]).sum(0)
    return (total if role.kind == "sum" else total / len(arrays)).astype(kind)


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a nested jitted function."""
    inner = eqn.params.get("jaxpr")
    called = eqn.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr)
    return inner if called else None


def _marks_gradients(jaxpr: Jaxpr) -> bool:
    inner = [called for eqn in jaxpr.eqns if (called := _called(eqn)) is not None]
    marked = any(is_gradient_mark(eqn) for eqn in jaxpr.eqns)
    return marked or any(_marks_gradients(one.jaxpr) for one in inner)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, JaxprLiteral)
