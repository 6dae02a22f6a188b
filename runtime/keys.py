"""Random keys of a step with several micro-batches.

Random numbers for samples are drawn in each micro-batch from the key folded with its number. Random
numbers that all samples share are drawn from the given key, and a key that the step returns is
derived from the given key, too. The difference shows when a function is traced at two sizes, of a
micro-batch and of the whole batch: numbers for samples have another shape.

The rewritten function takes the folded version of each key after its own arguments, as the row of a
batch. Until numbers are drawn, each value has two versions: one from the folded keys, one from the
given keys. Numbers drawn for samples get the marker `@alpa.random`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import Literal as JaxprLiteral

from alpa.dialects.attributes import SHARED
from alpa.runtime.key_rows import KeyRows
from alpa.runtime.markers import mark_random

_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform"})

_CHECKPOINT = jax.make_jaxpr(jax.checkpoint(lambda x: x))(0.0).eqns[0].primitive
"""`jax.checkpoint`; its name differs between versions of JAX."""

_BIJECTIVE = frozenset({"random_fold_in", "threefry2x32", "add", "sub", "xor"})
"""Another value of one operand, such as a key or a number, gives another result."""


class OtherProgramError(ValueError):
    """A function has different operations for a micro-batch than for the whole batch."""


def drawn_from(jaxpr: Jaxpr, other: Jaxpr | None = None) -> list[bool]:
    """For each argument, whether it is used as a key: to draw numbers or to make keys.

    Args:
        jaxpr: the function, at the size of a micro-batch.
        other: the same at the size of the whole batch. If given, only numbers for samples count.

    Raises:
        OtherProgramError: the two have different operations.
    """
    every, other = other is None, other or jaxpr
    needed: set[Any] = set()
    for eqn, counterpart in reversed(equations(jaxpr, other)):
        name = eqn.primitive.name
        if name in _DRAWS:
            read = eqn.invars[:1] if every or _grows(eqn, counterpart) is not None else []
        elif every and name == "random_wrap":
            read = list(eqn.invars)
        elif inner := _bodies(eqn):
            flags = [False] * len(eqn.invars)
            for body, whole in zip(inner, _bodies(counterpart), strict=True):
                offset = len(eqn.invars) - len(body.jaxpr.invars)
                used = [False] * len(body.jaxpr.invars)
                if every or _holds_draws(body.jaxpr):
                    used = drawn_from(body.jaxpr, None if every else whole.jaxpr)
                if name == "while":
                    flags = [True] * len(flags) if any(used) else flags
                else:
                    for n, flag in enumerate(used):
                        flags[n + max(0, offset)] |= flag
            read = [v for v, flag in zip(eqn.invars, flags, strict=True) if flag]
            if any(var in needed for var in eqn.outvars):
                read = list(eqn.invars)
        else:
            read = eqn.invars if any(var in needed for var in eqn.outvars) else []
            read = read[:1] if name == "random_fold_in" else read
        needed.update(v for v in read if not isinstance(v, JaxprLiteral))
    return [var in needed for var in jaxpr.invars]


def with_folded_keys(
    jaxpr: ClosedJaxpr, other: ClosedJaxpr, keys: Sequence[int], impls: Sequence[str | None]
) -> jax.stages.Traced:
    """Returns the function with a row of folded keys for each key, after its arguments.

    Args:
        jaxpr: the function.
        other: the same at the other size, of a micro-batch or of the whole batch.
        keys: the numbers of the arguments whose folded versions it takes.
        impls: the kind of typed key of each argument, as `jax.random.key_impl` gives it.

    Raises:
        OtherProgramError: the two have different operations.
    """
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in jaxpr.in_avals
    ]

    def raw(n: int) -> jax.ShapeDtypeStruct:
        if impls[n] is None:
            return structs[n]
        return cast(jax.ShapeDtypeStruct, jax.eval_shape(jax.random.key_data, structs[n]))

    rows = [jax.ShapeDtypeStruct((1, *raw(n).shape), np.uint32) for n in keys]

    def with_keys(*arguments: Any) -> list[Any]:
        given = [_Versions.same(array) for array in arguments[: len(structs)]]
        for n, row in zip(keys, arguments[len(structs) :], strict=True):
            impl = impls[n]
            folded = row[0] if impl is None else jax.random.wrap_key_data(row[0], impl=impl)
            given[n] = _Versions(folded, given[n].step, _Folded.ALL)
        return [result.step for result in _both_versions(jaxpr, other, given)]

    return jax.jit(with_keys, keep_unused=True).trace(*structs, *rows)


def drawn_in_micro_batches(
    whole: ClosedJaxpr, micro: ClosedJaxpr, keys: Sequence[int], number: int
) -> Callable[..., list[Any]]:
    """Returns the function at the whole batch, with the random numbers of its micro-batches.

    This is the reference for an exact plan that draws random numbers: each micro-batch draws from
    the keys folded with its number.

    Args:
        whole: the function at the size of the whole batch.
        micro: the same at the size of a micro-batch.
        keys: the numbers of the arguments that are folded.
        number: how many micro-batches there are.

    Raises:
        OtherProgramError: the two have different operations.
        ValueError: numbers are drawn for samples inside a branch, a `while`, or a `scan` over
            samples.
    """

    def run(*arrays: Any) -> list[Any]:
        given = [
            _Drawn(array, tuple(jax.random.fold_in(array, m) for m in range(number)))
            if n in keys
            else _Drawn(array)
            for n, array in enumerate(arrays)
        ]
        return [value.step for value in _drawn(whole, micro, given, number)]

    return run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Drawn:
    """A value, and its versions in the micro-batches if it depends on their keys."""

    step: Any
    micro: tuple[Any, ...] | None = None


def _drawn(
    whole: ClosedJaxpr, micro: ClosedJaxpr, given: Sequence[_Drawn], number: int
) -> list[_Drawn]:
    known: dict[Any, _Drawn] = dict(zip(whole.jaxpr.invars, given, strict=True))
    for var, const in zip(whole.jaxpr.constvars, whole.consts, strict=True):
        known[var] = _Drawn(const)

    def read(atom: Any) -> _Drawn:
        if isinstance(atom, JaxprLiteral):
            return _Drawn(np.asarray(atom.val, cast(ShapedArray, atom.aval).dtype))
        return known[atom]

    for eqn, counterpart in equations(whole.jaxpr, micro.jaxpr):
        inputs = [read(atom) for atom in eqn.invars]
        read_by = [*zip(inputs, eqn.invars, counterpart.invars, strict=True)]
        versions = [
            [_of_micro_batch(m, *each) for each in read_by]
            for m in range(number if any(value.micro for value in inputs) else 0)
        ]
        pairs = _body_pairs(eqn, counterpart)
        draws_inside = bool(versions) and any(draws(a.jaxpr, b.jaxpr) for a, b in pairs)
        if eqn.primitive.name in _INLINED or (draws_inside and eqn.primitive is _CHECKPOINT):
            ((inner, other),) = pairs
            results = _drawn(inner, other, inputs, number)
        elif draws_inside and _is_same_scan(eqn, counterpart):
            results = _drawn_in_scan(eqn, counterpart, inputs, number)
        elif eqn.primitive.name in _DRAWS:
            dim = _grows(eqn, counterpart)
            if dim is None or not versions:
                results = [_Drawn(v) for v in _as_function(whole.jaxpr, eqn)(_steps(inputs))]
            else:
                draw = _as_function(micro.jaxpr, counterpart)
                parts = zip(*(draw(version) for version in versions), strict=True)
                results = [_Drawn(jax.numpy.concatenate(part, axis=dim)) for part in parts]
        else:
            if draws_inside:
                raise ValueError(
                    f"numbers are drawn for the samples inside {eqn.primitive.name}; pass the "
                    "function to compare the plan with (reference=f)"
                )
            compute = _as_function(whole.jaxpr, eqn)
            each = [_as_function(micro.jaxpr, counterpart)(version) for version in versions]
            results = [
                _Drawn(value, tuple(parts[n] for parts in each) or None)
                for n, value in enumerate(compute(_steps(inputs)))
            ]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in whole.jaxpr.outvars]


def _is_same_scan(eqn: JaxprEqn, counterpart: JaxprEqn) -> bool:
    """Whether both are `lax.scan`, over equally many rows in the same order."""
    return eqn.primitive.name == "scan" and all(
        eqn.params[name] == counterpart.params[name]
        for name in ("length", "reverse", "num_consts", "num_carry")
    )


def _drawn_in_scan(
    eqn: JaxprEqn, counterpart: JaxprEqn, inputs: Sequence[_Drawn], number: int
) -> list[_Drawn]:
    """The results of a `lax.scan` at the whole batch whose body draws numbers for samples.

    The loop carries the versions of a value if it starts with some, or gets some in an iteration.
    """
    whole, micro = eqn.params["jaxpr"], counterpart.params["jaxpr"]
    first = eqn.params["num_consts"]
    end = first + eqn.params["num_carry"]
    variables = [*zip(whole.jaxpr.invars, micro.jaxpr.invars, strict=True)][first:end]

    def with_versions(values: Sequence[_Drawn], wanted: Sequence[_Drawn]) -> list[_Drawn]:
        return [
            _Drawn(value.step, tuple(_of_micro_batch(m, value, *pair) for m in range(number)))
            if like.micro is not None
            else value
            for value, like, pair in zip(values, wanted, variables, strict=True)
        ]

    def body(carry: list[_Drawn], row: list[_Drawn]) -> tuple[list[_Drawn], list[_Drawn]]:
        results = _drawn(whole, micro, [*inputs[:first], *carry, *row], number)
        # A version that the loop carries stays one.
        return with_versions(results[: end - first], carry), results[end - first :]

    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), [*inputs[end:]])
    carry = [*inputs[first:end]]
    while True:
        after, _ = jax.eval_shape(body, carry, row)
        if all((a.micro is None) == (b.micro is None) for a, b in zip(after, carry, strict=True)):
            break
        carry = with_versions(carry, after)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    last, rows = jax.lax.scan(body, carry, [*inputs[end:]], length=length, reverse=reverse)
    return [*last, *rows]


def _of_micro_batch(m: int, value: _Drawn, atom: Any, counterpart: Any) -> Any:
    """What micro-batch m reads: its version of a value, or its samples of one that has none."""
    if value.micro is not None:
        return value.micro[m]
    whole, shape = atom.aval.shape, counterpart.aval.shape
    if whole == shape:
        return value.step
    starts = [0 if a == b else m * b for a, b in zip(whole, shape, strict=True)]
    limits = [start + size for start, size in zip(starts, shape, strict=True)]
    return jax.lax.slice(value.step, starts, limits)


def _steps(values: Sequence[_Drawn]) -> list[Any]:
    return [value.step for value in values]


class _Folded(IntEnum):
    """How much of a value comes from folded keys.

    With `ALL`, numbers drawn from any part of it are others in each micro-batch. With `SOME`, parts
    may be the same in all micro-batches, such as one of several keys, or the key of one branch.
    """

    NONE = 0
    SOME = 1
    ALL = 2


@dataclass(frozen=True)
class _Versions:
    """A value from the keys of a micro-batch, and the same value from the given keys.

    Inside a loop or a branch, both are the folded version.
    """

    micro: Any
    step: Any
    folded: _Folded

    @classmethod
    def same(cls, value: Any) -> _Versions:
        return cls(value, value, _Folded.NONE)


def _both_versions(
    jaxpr: ClosedJaxpr,
    other: ClosedJaxpr,
    given: Sequence[_Versions],
    caller: Any = None,
) -> list[_Versions]:
    """The results of a jaxpr in both versions. Dead code removal deletes unused ones.

    `caller` is the traceback of the call of a nested jaxpr.
    """
    known: dict[Any, _Versions] = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        known[var] = _Versions.same(const)

    def read(atom: Any) -> _Versions:
        if isinstance(atom, JaxprLiteral):
            return _Versions.same(atom.val)
        return known[atom]

    rows = KeyRows()
    for eqn, counterpart in equations(jaxpr.jaxpr, other.jaxpr):
        inputs = [read(atom) for atom in eqn.invars]
        if caller is not None and not source_info_util.summarize(eqn.source_info):
            # Computations inside functions of jax.numpy have the place of the call.
            eqn = eqn.replace(source_info=eqn.source_info.replace(traceback=caller))
        with _named_as(eqn), source_info_util.user_context(eqn.source_info.traceback):
            results = _of_equation(jaxpr.jaxpr, eqn, counterpart, inputs)
        if rows.are_all_written(eqn, by_key=bool(inputs) and inputs[-1].folded is _Folded.ALL):
            results = [replace(result, folded=_Folded.ALL) for result in results]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def _of_equation(
    jaxpr: Jaxpr, eqn: JaxprEqn, counterpart: JaxprEqn, inputs: Sequence[_Versions]
) -> list[_Versions]:
    if eqn.primitive.name in _INLINED:
        (inner,), (whole,) = _bodies(eqn), _bodies(counterpart)
        if draws(inner.jaxpr, whole.jaxpr) or any(value.folded for value in inputs):
            return _both_versions(inner, whole, inputs, eqn.source_info.traceback)
    micro = [value.micro for value in inputs]
    step = [value.step for value in inputs]
    inputs_folded = [value.folded for value in inputs]
    if eqn.primitive.name in _DRAWS:
        dim = _grows(eqn, counterpart)
        if dim is None:
            shared = _as_function(jaxpr, eqn)(step)
            if inputs_folded[0] and micro[0] is step[0]:  # inside a loop or a branch
                shared = [mark_random(value, SHARED) for value in shared]
            return [_Versions.same(value) for value in shared]
        drawn = _as_function(jaxpr, eqn)(micro)
        if inputs_folded[0] is _Folded.NONE and _is_of_samples(eqn, counterpart):
            # Each sample has its own key, which is split with it.
            return [_Versions.same(value) for value in drawn]
        marked_dim = dim if inputs_folded[0] is _Folded.ALL else -1
        return [_Versions.same(mark_random(value, marked_dim)) for value in drawn]
    if any(inputs_folded) and any(
        draws(a.jaxpr, b.jaxpr) for a, b in _body_pairs(eqn, counterpart)
    ):
        # Inside a loop or a branch, all numbers are drawn from the folded keys. The proof refuses
        # numbers there that samples share.
        params, folded = _with_marks(eqn, counterpart, inputs_folded)
        drawn = _as_function(jaxpr, eqn.replace(params=params))(micro)
        kept = _as_function(jaxpr, eqn)(step)
        return [
            _Versions(a, b if part is _Folded.ALL and _may_be_key(var.aval) else a, part)
            for var, a, b, part in zip(eqn.outvars, drawn, kept, folded, strict=True)
        ]
    results = _as_function(jaxpr, eqn)(step)
    if not any(inputs_folded) and all(a is b for a, b in zip(micro, step, strict=True)):
        return [_Versions.same(value) for value in results]
    if eqn.primitive.name in ("scan", "while", "cond") or eqn.primitive is _CHECKPOINT:
        # The other size may have other operations where no numbers are drawn.
        _, folded = _with_marks(eqn, eqn, inputs_folded)
    else:
        folded = [_folded_part(eqn, var.aval, inputs_folded) for var in eqn.outvars]
    of_micro = results
    if any(a is not b for a, b in zip(micro, step, strict=True)):
        of_micro = _as_function(jaxpr, eqn)(micro)
    return [_Versions(*each) for each in zip(of_micro, results, folded, strict=True)]


def _folded_part(eqn: JaxprEqn, result: Any, operands: Sequence[_Folded]) -> _Folded:
    """How much of a result comes from folded keys, given how much of each operand does.

    A result that is chosen or put together from several keys does as far as all of them do.
    """
    most = max(operands)
    if eqn.primitive.name in _BIJECTIVE:
        return most
    # The other operands of a gather are places.
    atoms = eqn.invars[:1] if eqn.primitive.name == "gather" else eqn.invars
    keys = [
        part
        for atom, part in zip(atoms, operands, strict=False)
        if cast(ShapedArray, atom.aval).dtype == result.dtype
        and (_is_typed_key(result) or _has_words(atom.aval))
    ]
    return _Folded.SOME if most and min(keys, default=most) is not _Folded.ALL else most


def _is_typed_key(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _may_be_key(aval: Any) -> bool:
    """Whether a value may be a key: a typed one, or the words of one."""
    return _is_typed_key(aval) or (aval.dtype == np.uint32 and _has_words(aval))


def _has_words(aval: Any) -> bool:
    """Whether a value has the last dimension of the words of a key, of whatever type."""
    return aval.shape[-1:] in ((2,), (4,))


def _with_marks(
    eqn: JaxprEqn, counterpart: JaxprEqn, folded: Sequence[_Folded]
) -> tuple[dict[str, Any], list[_Folded]]:
    """The parameters of a loop or a branch whose bodies mark the numbers drawn for samples.

    Also says for each result how much of it comes from folded keys, as `folded` says of the
    operands. A value that a loop carries does if it does before the loop and after each iteration.
    """
    name, params, pairs = eqn.primitive.name, eqn.params, _body_pairs(eqn, counterpart)
    if name == "scan":
        first, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        carry, rows = [*folded[first:end]], folded[end:]
        body, carry, found = _marked_loop(*pairs[0], folded[:first], carry, rows)
        return {**params, "jaxpr": body}, [*carry, *found]
    if name == "while":
        bodies = [(params[key], counterpart.params[key]) for key in ("cond_jaxpr", "body_jaxpr")]
        first, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        body, carry, _ = _marked_loop(*bodies[1], folded[first:end], [*folded[end:]], [])
        condition, _ = _marked(*bodies[0], [*folded[:first], *carry])
        return {**params, "cond_jaxpr": condition, "body_jaxpr": body}, carry
    # The first operand of `cond` chooses a branch. The others are the operands of the branches.
    found = [_marked(a, b, folded[len(folded) - len(a.jaxpr.invars) :]) for a, b in pairs]
    marked = iter([body for body, _ in found])

    def replaced(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return next(marked)
        if isinstance(value, Jaxpr):
            closed = next(marked)
            assert not closed.consts, "a recomputed function captures arrays"
            return closed.jaxpr
        if isinstance(value, tuple) and any(isinstance(it, ClosedJaxpr) for it in value):
            return tuple(next(marked) for _ in value)
        return value

    results = [_either(*parts) for parts in zip(*(parts for _, parts in found), strict=True)]
    return {name: replaced(value) for name, value in params.items()}, results


def _either(*parts: _Folded) -> _Folded:
    """How much of a value comes from folded keys that is one of several."""
    return parts[0] if len({*parts}) == 1 else _Folded.SOME


def _marked_loop(
    body: ClosedJaxpr,
    other: ClosedJaxpr,
    consts: Sequence[_Folded],
    carry: list[_Folded],
    rows: Sequence[_Folded],
) -> tuple[ClosedJaxpr, list[_Folded], list[_Folded]]:
    """The marked body of a loop, and how much is folded of what it carries, and of its rows."""
    while True:
        marked, results = _marked(body, other, [*consts, *carry, *rows])
        after = [_either(a, b) for a, b in zip(carry, results, strict=False)]
        if after == carry:
            return marked, carry, results[len(carry) :]
        carry = after


def _marked(
    jaxpr: ClosedJaxpr, other: ClosedJaxpr, folded: Sequence[_Folded]
) -> tuple[ClosedJaxpr, list[_Folded]]:
    """A body with marks, and for each result how much of it comes from folded keys."""
    parts: list[_Folded] = []

    def run(*arguments: Any) -> list[Any]:
        pairs = zip(arguments, folded, strict=True)
        given = [_Versions(value, value, part) for value, part in pairs]
        results = _both_versions(jaxpr, other, given)
        parts[:] = [result.folded for result in results]
        return [result.micro for result in results]

    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in jaxpr.in_avals
    ]
    return jax.make_jaxpr(run)(*structs), parts


def draws(jaxpr: Jaxpr, other: Jaxpr) -> bool:
    """Whether numbers for samples are drawn, also in nested programs."""
    return _holds_draws(jaxpr) and any(
        _grows(eqn, counterpart) is not None
        if eqn.primitive.name in _DRAWS
        else any(draws(a.jaxpr, b.jaxpr) for a, b in _body_pairs(eqn, counterpart))
        for eqn, counterpart in equations(jaxpr, other)
    )


def _holds_draws(jaxpr: Jaxpr) -> bool:
    """Whether any numbers are drawn. If not, the other size may have other operations."""
    return any(
        eqn.primitive.name in _DRAWS or any(_holds_draws(it.jaxpr) for it in _bodies(eqn))
        for eqn in jaxpr.eqns
    )


def equations(jaxpr: Jaxpr, other: Jaxpr) -> list[tuple[JaxprEqn, JaxprEqn]]:
    """Pairs the equations of both sizes."""
    names = [[eqn.primitive.name for eqn in it.eqns] for it in (jaxpr, other)]
    if names[0] != names[1]:
        pairs = enumerate(zip(*names, strict=False))
        at = next((n for n, (a, b) in pairs if a != b), min(map(len, names)))
        longer = jaxpr if len(names[0]) > at else other
        near = sorted(longer.eqns, key=lambda eqn: eqn is not longer.eqns[at])
        places = (source_info_util.summarize(eqn.source_info) for eqn in near)
        place = next((it for it in places if it), None)
        raise OtherProgramError(
            f"{place or 'a function that is called'}: the function has different operations for a "
            "micro-batch than for the whole batch; write it without Python loops or branches over "
            "the size of the batch, or plan with 1 micro-batch"
        )
    return list(zip(jaxpr.eqns, other.eqns, strict=True))


def _body_pairs(eqn: JaxprEqn, other: JaxprEqn) -> list[tuple[ClosedJaxpr, ClosedJaxpr]]:
    return list(zip(_bodies(eqn), _bodies(other), strict=True))


def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs inside an equation, in the order of its parameters."""
    found: list[ClosedJaxpr] = []
    for value in eqn.params.values():
        for it in value if isinstance(value, tuple) else (value,):
            if isinstance(it, ClosedJaxpr):
                found.append(it)
            elif isinstance(it, Jaxpr):
                found.append(ClosedJaxpr(it, ()))
    return found


def is_shared_draw(eqn: JaxprEqn, counterpart: JaxprEqn) -> bool:
    """Whether numbers are drawn that all samples share."""
    return eqn.primitive.name in _DRAWS and _grows(eqn, counterpart) is None


def _grows(eqn: JaxprEqn, counterpart: JaxprEqn) -> int | None:
    """The dimension of drawn numbers that grows with the batch, -1 for several, None for none."""
    own, other = (cast(ShapedArray, it.outvars[-1].aval).shape for it in (eqn, counterpart))
    grown = [d for d, (a, b) in enumerate(zip(own, other, strict=True)) if a != b]
    return None if not grown else grown[0] if len(grown) == 1 else -1


def _is_of_samples(eqn: JaxprEqn, counterpart: JaxprEqn) -> bool:
    """Whether the first operand grows with the batch."""
    own, other = (cast(ShapedArray, it.invars[0].aval).shape for it in (eqn, counterpart))
    return own != other


def _named_as(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Traces inside the name of an equation, such as `transpose(jvp())`."""
    name = str(eqn.source_info.name_stack)
    inner = eqn.primitive.name in _INLINED
    return jax.named_scope(name) if name and inner else nullcontext()


def _as_function(jaxpr: Jaxpr, eqn: JaxprEqn) -> Callable[[Sequence[Any]], list[Any]]:
    """One equation of a jaxpr as a function from operands to results."""
    operands = dict.fromkeys(a for a in eqn.invars if not isinstance(a, JaxprLiteral))
    if not source_info_util.summarize(eqn.source_info):
        # A function that JAX traces once for all calls, such as `jnp.cumsum`, gets the place of its
        # call.
        traceback = source_info_util.current().traceback
        eqn = eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))
    alone = jaxpr.replace(constvars=[], invars=[*operands], outvars=eqn.outvars, eqns=[eqn])
    run = jaxpr_as_fun(ClosedJaxpr(alone, ()))

    def call(values: Sequence[Any]) -> list[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        by_var = {a: value for a, value in pairs if not isinstance(a, JaxprLiteral)}
        return list(run(*by_var.values()))

    return call
