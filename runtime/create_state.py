"""`alpa.create_state`: creates a training state on the devices that the plan assigns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from alpa.passes.base import check_kind
from alpa.runtime.calls import Call, Parameters, ResultLeaf
from alpa.runtime.option_checks import check_count
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.prepared import Prepared
from alpa.runtime.tracebacks import ends_at_caller
from alpa.runtime.tracing import Traced


@ends_at_caller
def create_state(
    init_fn: Callable[[], Any],
    train_step: Parallelized[..., Any],
    *others: Any,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """Returns `init_fn()`, with each array created on the devices that the plan assigns.

        state = alpa.create_state(init, train_step, batch)

    Each device creates its own shards; nothing is gathered. The numbers are those of
    `jax.jit(init_fn)`.

    Args:
        init_fn: a function without arguments that `jax.jit` accepts; its result is the state.
        train_step: the parallelised function that takes the state.
        others: its other arguments, in order; shapes (`jax.ShapeDtypeStruct`) are enough. They can
            be omitted if `train_step` has been called or planned with such a state.
        argnums: the position of the state among the arguments; several if `init_fn` returns
            a tuple of several arguments.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `others` are omitted, and the step's other arguments are unknown; or `argnums`
            are no positions of as many arguments as `init_fn` returns.
        PlanningError: there is no plan for the step.
    """
    state = NewState(init_fn, argnums)
    prepared, numbers = state.place(train_step, others)
    return state.result(prepared.executable.create(numbers, state.arrays))


class NewState:
    """The result of a function without arguments, before any arrays exist."""

    def __init__(self, init_fn: Callable[[], Any], argnums: int | Sequence[int]) -> None:
        """Raises TypeError if an argument is of another type."""
        check_kind("init_fn", init_fn, Callable)
        check_kind("argnums", argnums, int, Sequence)
        for position in (argnums,) if isinstance(argnums, int) else argnums:
            check_count("argnums", position, 0)
        self._traced = Traced(init_fn, Call.of(Parameters.of(init_fn), (), {}), [])
        self._argnums = argnums

    @property
    def leaves(self) -> tuple[ResultLeaf, ...]:
        """Its arrays, by path."""
        return self._traced.results

    def place(
        self, train_step: Parallelized[..., Any], others: Sequence[Any]
    ) -> tuple[Prepared, list[int]]:
        """Returns the step that takes the state, and the argument numbers of its arrays.

        Raises:
            TypeError, ValueError, PlanningError: as for `create_state`.
        """
        check_kind("train_step", train_step, Parallelized)
        shapes = self.result([leaf.type.struct() for leaf in self.leaves])
        argnums = self._argnums
        if isinstance(argnums, int):
            given: dict[int, Any] = {argnums: shapes}
        elif not isinstance(shapes, tuple | list) or len(shapes) != len(argnums):
            raise ValueError(
                f"argnums are {argnums!r}; init_fn has to return a tuple of {len(argnums)} "
                "arguments for them"
            )
        else:
            given = dict(zip(argnums, cast("Sequence[Any]", shapes), strict=True))
        names = [train_step.parameter(position) for position in given]
        if others:
            left = iter(others)
            count = len(given) + len(others)
            arguments = [given[n] if n in given else next(left) for n in range(count)]
            prepared = train_step.prepare(*arguments)
        else:
            prepared = train_step.prepared_for(names, [leaf.type.strong for leaf in self.leaves])
            if prepared is None:
                raise ValueError(
                    f"{train_step.__name__} has not been planned for such a state; pass its other "
                    "arguments, arrays or shapes: create_state(init_fn, step, batch)"
                )
        arrays = [leaf.argument for leaf in prepared.step.call.arrays]
        return prepared, [
            n for name in names for n, argument in enumerate(arrays) if argument == name
        ]

    def arrays(self) -> list[jax.Array]:
        """Its arrays as a plan takes them (traceable): strongly typed, keys as their words."""
        jaxpr = self._traced.jaxpr
        return [
            jax.random.key_data(array)
            if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            # Constants may be numbers of Python.
            else jnp.asarray(array, aval.dtype)
            for array, aval in zip(jaxpr_as_fun(jaxpr)(), jaxpr.out_avals, strict=True)
        ]

    def result(self, arrays: Sequence[Any]) -> Any:
        """Builds the state from these arrays."""
        return self._traced.result(arrays)
