"""`alpa.create_state`: a training state that is born where the plan wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from alpa.runtime.calls import Call, Parameters
from alpa.runtime.jit import Parallelized
from alpa.runtime.tracing import Traced


def create_state(
    init_fn: Callable[[], Any],
    train_step: Parallelized,
    *others: Any,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """What `init_fn()` returns, each array made by the devices that the plan gives it to.

        state = alpa.create_state(init, train_step, batch)

    No device or host ever holds more than its share. The numbers are those of `jax.jit(init_fn)`.

    Args:
        init_fn: a function without arguments that `jax.jit` could take; its result is the state.
        train_step: the parallelised function that takes the state.
        others: its other arguments, in their order; shapes (`jax.ShapeDtypeStruct`) are enough.
            Where `train_step` has been called or planned with such a state, they can be left out.
        argnums: the position of the state among the arguments; several where `init_fn` returns
            a tuple of several arguments.

    Raises:
        ValueError: `others` are left out, and it is not known what the step will be called with.
        PlanningError: there is no plan for the step.
    """
    traced = Traced(init_fn, Call.of(Parameters.of(init_fn), (), {}), [])
    shapes = traced.result([leaf.type.struct() for leaf in traced.results])
    alone = isinstance(argnums, int)
    given: dict[int, Any] = {argnums: shapes} if alone else dict(zip(argnums, shapes, strict=True))
    names = [train_step.parameter(position) for position in given]
    if others:
        left = iter(others)
        count = len(given) + len(others)
        arguments = [given[n] if n in given else next(left) for n in range(count)]
        prepared = train_step.prepare(*arguments)
    else:
        types = [leaf.type for leaf in traced.results]
        prepared = train_step.prepared_for(names, types)
        if prepared is None:
            raise ValueError(
                f"{train_step.__name__} has not been planned for such a state; give create_state "
                "the other arguments, too, arrays or shapes: create_state(init_fn, step, batch)"
            )
    arrays = [leaf.argument for leaf in prepared.step.call.arrays]
    numbers = [n for name in names for n, argument in enumerate(arrays) if argument == name]
    return traced.result(prepared.executable.create(numbers, partial(_strong, traced)))


def _strong(traced: Traced) -> list[jax.Array]:
    """The results of a function without arguments as a step returns them: strongly typed, keys as
    their words."""
    return [
        jax.random.key_data(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        else jnp.asarray(array, array.dtype)
        for array in jaxpr_as_fun(traced.jaxpr)()
    ]
