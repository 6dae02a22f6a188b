"""`alpa.compare_with_jax`: runs one step as planned and as plain JAX, and compares the results.

    print(alpa.compare_with_jax(train_step, state, batch))

`alpa.runtime.comparison` defines equality and separates faults from noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa.dialects import bytecode, ir, parse, separate
from alpa.dialects.symbols import hide_computations
from alpa.passes.analysis.micro_batches.whole import strip_whole
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.calls import Call, LeafType
from alpa.runtime.compare_programs import compare_programs, is_moment, narrow_results
from alpa.runtime.comparison import Comparison
from alpa.runtime.dtypes import is_integer
from alpa.runtime.keys import drawn_in_micro_batches
from alpa.runtime.looped import looped
from alpa.runtime.markers import to_custom_calls
from alpa.runtime.noise import Output, Reference, compare_with_noise
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.planning import plan
from alpa.runtime.prepared import Prepared
from alpa.runtime.reference import random_arguments
from alpa.runtime.shrink import shrink as shrink_module
from alpa.runtime.step import Lowered
from alpa.runtime.tracing import depends_on

_COPIES = 3
"""Copies of all arguments besides one per device: the caller's, the reference's, its results."""


def compare_with_jax(
    train_step: Parallelized[..., Any],
    *args: Any,
    reference: Callable[..., Any] | Literal["whole-batch", "micro-batches"] | None = None,
    shrink: Mapping[int, int] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Comparison:
    """Runs one step of a parallelised function as planned and as plain JAX, and compares them.

    Args:
        train_step: a function that `alpa.parallelize` returned.
        args, kwargs: the arguments of a step. They are not donated. For shapes
            (`jax.ShapeDtypeStruct`), random arrays are drawn that keep the step finite.
        reference: the program to compare with. "whole-batch" is the function itself with `jax.jit`
            on one device. "micro-batches" loops over the micro-batches in the same way. A function
            with the arguments and results of `train_step` is used directly. By default the whole
            batch, or the micro-batches if keys are folded with their number.
        shrink: new sizes by old ones, for a step that is too large for this machine. A smaller
            program of the same structure is planned with the same settings, run in this process
            on random arguments, and compared with itself on one device. Sizes of the batch are
            those of a micro-batch.
        seed: the seed of random arrays.

    Raises:
        TypeError: `train_step` is not a parallelised function.
        ValueError: the step does not fit on this machine, cannot be shrunk like this, or has no
            reference.
        PlanningError: there is no plan for the step.
    """
    _check(train_step)
    if shrink:
        return _shrunk(train_step, args, kwargs, shrink, seed)
    prepared = train_step.prepare(*args, **kwargs)
    call = train_step.call(*args, **kwargs)
    target = train_step.target
    target.check_devices()
    if target.executor == "local":
        devices = sum(len(mesh.devices) for mesh in prepared.plan.meshes)
        types = [leaf.type for leaf in call.arrays if leaf.type is not None]
        check_memory(sum(_bytes(type_) for type_ in types), devices, prepared.step.name)
    plain = _reference(prepared, call, reference)
    arguments = _arguments(prepared, call, plain.module, seed)
    clock = Clock()
    with clock.phase("plan"):
        results = _leaves(prepared.run(_with_arrays(call, arguments, prepared)))
    return compare_with_noise(results, arguments, plain, _outputs(prepared, plain.module), clock)


def plain_jax(
    flat: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct], description: str
) -> Reference:
    """The function with `jax.jit` on the first device, as a reference for a plan."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    placed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, weak_type=s.weak_type, sharding=sharding)
        for s in structs
    ]
    lowered = jax.jit(flat, keep_unused=True).lower(*placed)
    module = parse(bytecode(cast(ir.Module, lowered.compiler_ir())))
    hide_computations(module)
    to_custom_calls(module)
    compiled = lowered.compile()

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        return compiled(*(jax.device_put(array, sharding) for array in arguments))

    return Reference(description=description, run=run, module=module)


def check_memory(size: int, devices: int, name: str) -> None:
    """Raises ValueError if copies of so many bytes on virtual devices do not fit in memory.

    Devices with their own memory are not checked.
    """
    if jax.devices()[0].platform != "cpu":
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = size * (devices + _COPIES)
    if needed > memory:
        raise ValueError(
            f"{name} has {size / 2**30:.1f} GiB of arguments, up to {needed / 2**30:.0f} GiB on "
            f"{devices} virtual devices and as the reference, and this machine has "
            f"{memory / 2**30:.0f} GiB; shrink its sizes, such as shrink={{4096: 128}}"
        )


def _check(train_step: Any) -> None:
    if not isinstance(train_step, Parallelized):
        raise TypeError(
            "compare_with_jax takes a function that alpa.parallelize returned, not "
            f"{type(train_step).__name__}; parallelize the function first"
        )


def _shrunk(
    train_step: Parallelized[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    sizes: Mapping[int, int],
    seed: int,
) -> Comparison:
    target = train_step.target
    lowered = train_step.lower(*args, **kwargs)
    number = lowered.num_micro_batches
    if number > 1 and target.loss_reduction == "sum":
        raise ValueError(
            f"shrink= compares averages over micro-batches, and {train_step.__name__} adds up "
            f'those of {number} (loss_reduction="sum"); compare it with num_micro_batches=1'
        )
    small = separate(lowered.module.operation)
    strip_whole(small)
    shrink_module(small, sizes)
    small.operation.verify()
    settings = replace(target.settings, num_micro_batches=number)
    target.check_devices()
    planned = plan(small, settings, Clock()).module
    labels = [result.label for result in lowered.traced.results]
    return compare_programs(
        small, planned, seed=seed, labels=labels, compiler_options=target.compiler_options
    )


def _reference(
    prepared: Prepared,
    call: Call,
    given: Callable[..., Any] | Literal["whole-batch", "micro-batches"] | None,
) -> Reference:
    step, lowered = prepared.step, prepared.lowered
    impls, number = step.whole.key_impls, lowered.num_micro_batches
    independent = step.micro_batches == "independent" and number > 1
    by_micro_batches = given == "micro-batches" or (given is None and independent)
    if given is not None and not callable(given) and given not in ("whole-batch", "micro-batches"):
        raise ValueError(
            f"reference is {given!r}; expected whole-batch, micro-batches or a function"
        )

    def invoked(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: call.invoke(fun, arrays)

    if by_micro_batches and number > 1:
        function: Callable[..., Any] = looped(lowered, prepared.target.loss_reduction)
        description = f"plain JAX from micro-batch to micro-batch ({number} of them)"
    elif callable(given):
        description = f"{getattr(given, '__name__', 'the given reference')}, in plain JAX"
        function = invoked(given)
    elif given is None and number > 1 and _draws_numbers(lowered):
        samples = (step.batch_size or 0) // number
        description = f"plain JAX, with numbers drawn by {number} micro-batches"
        function = drawn_in_micro_batches(
            step.whole.jaxpr, step.traced(samples).jaxpr, lowered.folded, number
        )
    else:
        description = "plain JAX on one device"
        function = invoked(step.fun)

    def flat(*words: Any) -> list[Any]:
        arrays = [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(words, impls, strict=True)
        ]
        return [_words(leaf) for leaf in jax.tree.leaves(function(*arrays)) if _is_array(leaf)]

    types = [leaf.type for leaf in call.arrays if leaf.type is not None]
    return plain_jax(flat, [_struct(type_) for type_ in types], description)


def _draws_numbers(lowered: Lowered) -> bool:
    """Whether results depend on keys that are folded with the number of the micro-batch."""
    folded = [n in lowered.folded for n in range(len(lowered.step.call.arrays))]
    return any(depends_on(lowered.traced.jaxpr.jaxpr, folded))


def _arguments(prepared: Prepared, call: Call, module: ir.Module, seed: int) -> list[np.ndarray]:
    """The arrays of a call, keys as their words; random arrays replace shapes."""
    abstract = {
        n for n, leaf in enumerate(call.arrays) if isinstance(leaf.value, jax.ShapeDtypeStruct)
    }
    drawn = random_arguments(module, seed) if abstract else []
    program = prepared.executable.program if abstract else None
    arrays: list[np.ndarray] = []
    for n, leaf in enumerate(call.arrays):
        assert leaf.type is not None
        if n not in abstract:
            value = jax.random.key_data(leaf.value) if leaf.type.is_typed_key else leaf.value
            dtype = None if leaf.type.is_typed_key else leaf.type.dtype
            arrays.append(np.array(value, dtype))
        elif program is not None and is_moment(program, n, drawn[n]):
            arrays.append(np.full_like(drawn[n], is_integer(drawn[n].dtype)))
        else:
            arrays.append(drawn[n])
    return arrays


def _with_arrays(call: Call, arguments: Sequence[np.ndarray], prepared: Prepared) -> Call:
    """The call with copies of these arrays, which a step may donate."""
    impls = prepared.step.whole.key_impls
    values = iter(
        array if impl is None else jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
        for array, impl in zip(arguments, impls, strict=True)
    )
    pairs = zip(call.values, call.types, strict=True)
    given = (value if type_ is None else next(values) for value, type_ in pairs)
    return replace(call, values=tuple(given))


def _outputs(prepared: Prepared, module: ir.Module) -> list[Output]:
    results = prepared.step.whole.results
    states = {result: argument for argument, result in prepared.step.state.items()}
    return [
        Output(label=leaf.label, type=str(leaf.type), state=states.get(n), is_narrow=narrow)
        for n, (leaf, narrow) in enumerate(zip(results, narrow_results(module), strict=True))
    ]


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(_words(leaf)) for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or not callable(leaf)


def _words(leaf: Any) -> Any:
    """The words of a typed key; any other array unchanged."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _struct(type_: LeafType) -> jax.ShapeDtypeStruct:
    if type_.is_typed_key:
        return cast(jax.ShapeDtypeStruct, jax.eval_shape(jax.random.key_data, type_.struct()))
    return type_.struct()


def _bytes(type_: LeafType) -> int:
    struct = _struct(type_)
    return struct.size * struct.dtype.itemsize
