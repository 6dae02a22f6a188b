"""`alpa.create_state`: a training state that is born where the plan wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from alpa.dialects.attributes import Slice
from alpa.passes.analysis.planned import ProgramArgument
from alpa.runtime.calls import Call, Parameters
from alpa.runtime.cut_array import CutArray
from alpa.runtime.executable import Executable
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
    return traced.result(_made(traced, numbers, prepared.executable))


def _made(traced: Traced, numbers: Sequence[int], executable: Executable) -> list[Any]:
    """The results of a function without arguments, where the program wants these arguments."""
    placement = executable.placement
    result = {number: r for r, number in enumerate(numbers)}
    wanted: dict[tuple[int, Slice | None], ProgramArgument] = {}
    for argument in placement.program.arguments:
        if argument.number in result:
            wanted.setdefault((result[argument.number], argument.attributes.slice), argument)
    meshes: dict[str, list[tuple[int, Slice | None]]] = {}
    for key, argument in wanted.items():
        meshes.setdefault(placement.program.values[argument.value].mesh, []).append(key)
    arrays: list[Any] = [None] * len(numbers)
    parts: dict[int, dict[Slice, jax.Array]] = {}
    for keys in meshes.values():
        shardings = [placement.shardings[wanted[key].value] for key in keys]
        made = jax.jit(partial(_some, traced, keys), out_shardings=shardings)()
        for (r, part), array in zip(keys, made, strict=True):
            if part is None:
                arrays[r] = array
            else:
                parts.setdefault(r, {})[part] = array
    for r, cut in parts.items():
        arrays[r] = CutArray(cut)
    return arrays


def _some(traced: Traced, keys: Sequence[tuple[int, Slice | None]]) -> list[jax.Array]:
    """Results by their numbers, or slices of them; keys as their words."""
    results = jaxpr_as_fun(traced.jaxpr)()
    found: list[jax.Array] = []
    for r, part in keys:
        array = results[r]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        array = jnp.asarray(array, array.dtype)  # strongly typed, as a step returns it
        if part is not None:
            array = jax.lax.slice_in_dim(array, part.start, part.stop, axis=part.dim)
        found.append(array)
    return found
