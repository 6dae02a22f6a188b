"""The analysis's claims about programs, case by case and at random, against numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from alpa.dialects import ir, stablehlo
from alpa.dialects.records import i64
from alpa.passes.analysis.micro_batches import (
    contractions,
    elementwise,
    indexing,
    matrices,
    relate,
    shapes,
)
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relation import SAME, Relation

_Size = tuple[int, bool]
"""A multiple, and whether of the number of samples."""


@dataclass(frozen=True)
class _Array:
    value: jax.Array
    sizes: tuple[_Size, ...]

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def sample_dims(self) -> list[int]:
        return [d for d, (_, grows) in enumerate(self.sizes) if grows]


class _Author:
    """Writes a random function, the same for every number of samples.

    Its choices depend on how sizes vary with the number of samples, never on the sizes themselves.
    """

    def __init__(
        self, seed: int, arrays: Sequence[_Array], labels: jax.Array, samples: int
    ) -> None:
        self.random = random.Random(seed)
        self.pool = list(arrays)
        self.labels = labels
        self.samples = samples

    def write(self, steps: int) -> list[jax.Array]:
        for _ in range(steps):
            made = self.random.choice(_MAKERS)(self, self.random.choice(self.pool))
            if made is not None and made.rank <= 4 and np.prod([m for m, _ in made.sizes]) <= 64:
                self.pool.append(made)
        return [array.value for array in self.pool[-3:]]

    def size(self, size: _Size) -> int:
        return size[0] * self.samples if size[1] else size[0]

    def alike(self, x: _Array) -> _Array:
        return self.random.choice([y for y in self.pool if y.sizes == x.sizes])

    def dim(self, x: _Array) -> int:
        return self.random.randrange(x.rank)

    def integers(self, count: int, limit: int) -> np.ndarray:
        return np.array([self.random.randrange(limit) for _ in range(count)])


_Maker = Callable[[_Author, _Array], "_Array | None"]


def _unary(author: _Author, x: _Array) -> _Array:
    functions: list[Callable[[jax.Array], jax.Array]] = [
        jnp.tanh,
        jnp.negative,
        jnp.abs,
        jnp.square,
        jax.nn.relu,
        lambda v: v * 2,
        lambda v: v + 1,
        lambda v: v / 3,
        lambda v: jnp.clip(v, -1, 1),
        lambda v: jnp.sqrt(jnp.abs(v) + 1),
        lambda v: jnp.where(v > 0, v, 0),
        lambda v: jnp.where(v > 0, v, 1.5),
        lambda v: v * author.samples,
        lambda v: v / author.samples,
        lambda v: v / np.sqrt(author.samples),
        lambda v: v * 0,
        lambda v: jnp.round(v).astype(jnp.int32).astype(v.dtype),
        lambda v: (v > 0).astype(v.dtype),
        jax.lax.stop_gradient,
        lambda v: v.astype(jnp.float32).astype(v.dtype),
        lambda v: jnp.sum(jnp.ones_like(v)) * v,
    ]
    return replace(x, value=author.random.choice(functions)(x.value))


def _binary(author: _Author, x: _Array) -> _Array:
    functions: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.maximum,
        lambda a, b: a / (jnp.abs(b) + 1),
        lambda a, b: jnp.where(b > 0, a, 0),
        lambda a, b: jnp.where(a > b, a, b),
        lambda a, b: jax.lax.cond(jnp.sum(b) > 0, lambda: a, lambda: a * 2),
        lambda a, b: jnp.real(jax.lax.complex(a, b) * jax.lax.complex(b, a)),
    ]
    return replace(x, value=author.random.choice(functions)(x.value, author.alike(x).value))


def _scaled_by(author: _Author, x: _Array) -> _Array:
    """Divides by one number that is made of another array."""
    other = author.random.choice(author.pool).value
    number = author.random.choice([jnp.mean, jnp.sum, jnp.max])(other)
    functions: list[Callable[[jax.Array], jax.Array]] = [
        lambda v: v * number,
        lambda v: v / (jnp.abs(number) + 1),
        lambda v: v - number,
        lambda v: v + jnp.broadcast_to(number, v.shape),
    ]
    return replace(x, value=author.random.choice(functions)(x.value))


def _reduction(author: _Author, x: _Array) -> _Array | None:
    if not x.rank:
        return None
    d = author.dim(x)
    functions: list[Callable[..., jax.Array]] = [
        jnp.sum,
        jnp.sum,
        jnp.mean,
        jnp.mean,
        jnp.max,
        jnp.var,
        jax.nn.logsumexp,
        lambda v, axis, keepdims: jnp.any(v > 1, axis=axis, keepdims=keepdims).astype(v.dtype),
        lambda v, axis, keepdims: jnp.argmax(v, axis=axis, keepdims=keepdims).astype(v.dtype),
        lambda v, axis, keepdims: (
            jnp.sum(jnp.round(v).astype(jnp.int32), axis=axis, keepdims=keepdims) // 2
        ).astype(v.dtype),
    ]
    function = author.random.choice(functions)
    if author.random.random() < 0.3:
        value = jnp.broadcast_to(function(x.value, axis=d, keepdims=True), x.value.shape)
        return replace(x, value=value)
    value = function(x.value, axis=d, keepdims=False)
    return _Array(value, (*x.sizes[:d], *x.sizes[d + 1 :]))


def _along(author: _Author, x: _Array) -> _Array | None:
    if not x.rank:
        return None
    functions: list[Callable[..., jax.Array]] = [
        lambda v, axis: jax.nn.softmax(v, axis=axis),
        lambda v, axis: jnp.cumsum(v, axis=axis),
        lambda v, axis: jnp.sort(v, axis=axis),
        lambda v, axis: jnp.flip(v, axis=axis),
        lambda v, axis: jnp.real(jnp.fft.fft(v, axis=axis)),
        lambda v, axis: jnp.roll(v, 1, axis=axis),
        lambda v, axis: jax.lax.top_k(jnp.moveaxis(v, axis, -1), 1)[0].sum() * v,
        lambda v, axis: v - v.mean(axis=axis, keepdims=True),
        lambda v, axis: (
            v * jax.lax.scan(lambda c, r: (c + r.sum(), r), 0.0, jnp.moveaxis(v, axis, 0))[0]
        ),
        lambda v, axis: jnp.moveaxis(
            jax.lax.scan(
                lambda c, r: (c + r, c * r), 0 * v.take(0, axis), jnp.moveaxis(v, axis, 0)
            )[1],
            0,
            axis,
        ),
    ]
    return replace(x, value=author.random.choice(functions)(x.value, axis=author.dim(x)))


def _transposed(author: _Author, x: _Array) -> _Array:
    order = list(range(x.rank))
    author.random.shuffle(order)
    return _Array(x.value.transpose(order), tuple(x.sizes[d] for d in order))


def _merged(author: _Author, x: _Array) -> _Array | None:
    if x.rank < 2:
        return None
    d = author.random.randrange(x.rank - 1)
    (a, of_a), (b, of_b) = x.sizes[d : d + 2]
    if of_a and of_b:
        return None
    sizes = (*x.sizes[:d], (a * b, of_a or of_b), *x.sizes[d + 2 :])
    return _Array(x.value.reshape([author.size(s) for s in sizes]), sizes)


def _cut(author: _Author, x: _Array) -> _Array | None:
    """A dimension becomes two, in one order or the other."""
    dims = [d for d, (multiple, _) in enumerate(x.sizes) if multiple % 2 == 0 or multiple % 3 == 0]
    if not dims:
        return None
    d = author.random.choice(dims)
    multiple, grows = x.sizes[d]
    factor = 2 if multiple % 2 == 0 else 3
    pair: list[_Size] = [(multiple // factor, grows), (factor, False)]
    author.random.shuffle(pair)
    sizes = (*x.sizes[:d], *pair, *x.sizes[d + 1 :])
    return _Array(x.value.reshape([author.size(s) for s in sizes]), sizes)


def _part(author: _Author, x: _Array) -> _Array | None:
    dims = [d for d, (multiple, grows) in enumerate(x.sizes) if multiple > 1]
    if not dims:
        return None
    d = author.random.choice(dims)
    multiple, grows = x.sizes[d]
    unit = author.samples if grows else 1
    start, stop = (0, multiple - 1) if author.random.random() < 0.5 else (1, multiple)
    value = jax.lax.slice_in_dim(x.value, start * unit, stop * unit, axis=d)
    return _Array(value, (*x.sizes[:d], (multiple - 1, grows), *x.sizes[d + 1 :]))


def _joined(author: _Author, x: _Array) -> _Array | None:
    if not x.rank:
        return None
    d, y = author.dim(x), author.alike(x)
    multiple, grows = x.sizes[d]
    value = jnp.concatenate([x.value, y.value], axis=d)
    return _Array(value, (*x.sizes[:d], (2 * multiple, grows), *x.sizes[d + 1 :]))


def _stacked(author: _Author, x: _Array) -> _Array:
    y = author.alike(x)
    return _Array(jnp.stack([x.value, y.value]), ((2, False), *x.sizes))


def _padded(author: _Author, x: _Array) -> _Array | None:
    dims = [d for d, (_, grows) in enumerate(x.sizes) if not grows]
    if not dims:
        return None
    d = author.random.choice(dims)
    widths = [(1, 0) if n == d else (0, 0) for n in range(x.rank)]
    value = jnp.pad(x.value, widths, constant_values=author.random.choice([0.0, 2.0]))
    return _Array(value, (*x.sizes[:d], (x.sizes[d][0] + 1, False), *x.sizes[d + 1 :]))


def _repeated(author: _Author, x: _Array) -> _Array:
    size = author.random.choice([(2, False), (3, False), (1, True)])
    d = author.random.randrange(x.rank + 1)
    sizes = (*x.sizes[:d], size, *x.sizes[d:])
    value = jnp.broadcast_to(jnp.expand_dims(x.value, d), [author.size(s) for s in sizes])
    return _Array(value, sizes)


def _product(author: _Author, x: _Array) -> _Array | None:
    """An einsum of two arrays, over a dimension of one size and perhaps along another."""
    y = author.random.choice(author.pool)
    pairs = [(a, b) for a in range(x.rank) for b in range(y.rank) if x.sizes[a] == y.sizes[b]]
    if not pairs:
        return None
    author.random.shuffle(pairs)
    left, right = "abcd"[: x.rank], list("efgh"[: y.rank])
    over = pairs[0]
    right[over[1]] = left[over[0]]
    along = [p for p in pairs[1:] if p[0] != over[0] and p[1] != over[1]]
    kept = ""
    if along and author.random.random() < 0.5:
        right[along[0][1]] = kept = left[along[0][0]]
    rest = [c for c in (*left, *right) if c not in (left[over[0]], kept)]
    out = ([kept] if kept else []) + rest
    sizes = dict(zip((*left, *right), (*x.sizes, *y.sizes), strict=True))
    if len(out) > 4 or sum(sizes[c][1] for c in out) > 1 + author.random.randrange(2):
        return None
    value = jnp.einsum(f"{left},{''.join(right)}->{''.join(out)}", x.value, y.value)
    return _Array(value, tuple(sizes[c] for c in out))


def _looked_up(author: _Author, x: _Array) -> _Array | None:
    """Rows of an array without samples, by the labels."""
    if not x.rank or x.sizes[0][1]:
        return None
    rows = x.value[author.labels % x.sizes[0][0]]
    return _Array(rows, ((1, True), *x.sizes[1:]))


def _picked(author: _Author, x: _Array) -> _Array | None:
    """Along one dimension: by constants, or for each sample by its label."""
    if not x.rank:
        return None
    d = author.dim(x)
    if x.rank == 2 and x.sizes[0] == (1, True) and not x.sizes[1][1]:
        labels = author.labels % x.sizes[1][0]
        picks = [
            lambda: x.value[jnp.arange(author.samples), labels],
            lambda: jnp.take_along_axis(x.value, labels[:, None], 1)[:, 0],
            lambda: jnp.sum(x.value * jax.nn.one_hot(labels, x.sizes[1][0]), 1),
            lambda: jax.vmap(lambda row, n: row[n])(x.value, labels),
            lambda: jax.vmap(lambda row, n: jax.lax.dynamic_slice(row, (n,), (1,))[0])(
                x.value, labels
            ),
        ]
        return _Array(author.random.choice(picks)(), x.sizes[:1])
    if x.sizes[d][1]:
        return None
    picks = author.integers(2, x.sizes[d][0])
    value = jnp.take(x.value, picks, axis=d, mode=author.random.choice(["clip", "fill", None]))
    return _Array(value, (*x.sizes[:d], (2, False), *x.sizes[d + 1 :]))


def _written(author: _Author, x: _Array) -> _Array | None:
    """A scatter: of rows by the labels, of columns by constants."""
    if x.rank and x.sizes[0] == (1, True):
        base = jnp.zeros((3, *x.value.shape[1:]), x.value.dtype)
        at = base.at[author.labels % 3]
        value = at.add(x.value) if author.random.random() < 0.7 else at.max(x.value)
        return _Array(value, ((3, False), *x.sizes[1:]))
    if x.rank == 2 and x.sizes[1] == (1, True):
        return replace(x, value=x.value.at[author.integers(1, x.sizes[0][0])].set(0.5))
    if not x.rank or x.sizes[-1][1]:
        return None
    at = jnp.asarray(x.value).at[..., author.integers(1, x.sizes[-1][0])]
    return replace(x, value=at.set(1.0) if author.random.random() < 0.5 else at.add(1.0))


def _of_gradient(author: _Author, x: _Array) -> _Array | None:
    """The gradient of a number made of an array, by another one."""
    y = author.random.choice(author.pool)
    number = author.random.choice([jnp.mean, jnp.sum, jax.nn.logsumexp])
    outer = author.random.choice([lambda v: v, jnp.square, jnp.tanh])
    pairs = [(a, b) for a in range(x.rank) for b in range(y.rank) if x.sizes[a] == y.sizes[b]]

    def loss(v: jax.Array) -> jax.Array:
        if not pairs:
            return outer(number(jnp.tanh(v) * jnp.mean(y.value)))
        a, b = pairs[0]
        return outer(number(jnp.tensordot(jnp.tanh(v), y.value, ([a], [b]))))

    return replace(x, value=jax.grad(loss)(x.value))


def _looped(author: _Author, x: _Array) -> _Array:
    y = author.alike(x).value
    loops: list[Callable[[jax.Array], jax.Array]] = [
        lambda v: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.5 + y, v),
        lambda v: jax.lax.fori_loop(0, 3, lambda i, c: c + y, jnp.zeros_like(v)),
        lambda v: jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + i), (v, y))[0],
        lambda v: jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c + 1 + abs(y), v),
        lambda v: jax.lax.cond(jnp.max(y) > 1, lambda: v, lambda: -v),
        lambda v: jax.lax.fori_loop(0, 2, lambda i, c: c + jnp.sum(y), v),
        lambda v: jax.lax.fori_loop(
            0, 2, lambda i, c: jax.lax.fori_loop(0, 2, lambda j, e: e * 0.5 + y, c) - v, v
        ),
    ]
    return replace(x, value=author.random.choice(loops)(x.value))


def _images(author: _Author, x: _Array) -> _Array | None:
    """A convolution, or pooling, along the last dimension."""
    if x.rank != 2 or x.sizes[1][1]:
        return None
    image = x.value[:, :, None]
    kernel = jnp.arange(2.0, 4.0)[:, None, None].astype(x.value.dtype)
    made = [
        lambda: jax.lax.conv_general_dilated(
            image, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        lambda: jax.lax.reduce_window(image, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
        lambda: jax.lax.reduce_window(image, -np.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME"),
        lambda: jax.grad(
            lambda v: jnp.sum(
                jax.lax.reduce_window(v, -np.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME")
            )
        )(image),
    ]
    return replace(x, value=author.random.choice(made)()[:, :, 0])


def _solved(author: _Author, x: _Array) -> _Array | None:
    if x.rank != 2 or x.sizes[1][1]:
        return None
    eye = 4 * jnp.eye(x.sizes[1][0])
    matrices = x.value[:, :, None] * x.value[:, None, :] / 10 + eye
    made = [
        lambda: jnp.linalg.cholesky(matrices)[:, :, 0],
        lambda: jnp.linalg.solve(matrices, x.value[:, :, None])[:, :, 0],
        lambda: jnp.linalg.eigvalsh(matrices),
    ]
    return replace(x, value=author.random.choice(made)())


_MAKERS: list[_Maker] = [
    _unary,
    _unary,
    _binary,
    _binary,
    _scaled_by,
    _reduction,
    _reduction,
    _along,
    _transposed,
    _merged,
    _cut,
    _part,
    _joined,
    _stacked,
    _padded,
    _repeated,
    _product,
    _product,
    _looked_up,
    _picked,
    _written,
    _of_gradient,
    _looped,
    _images,
    _solved,
]


def _random_program(program: type, seed: int, number: int) -> Any:
    """A function of two batches, labels and two parameters."""
    generator = np.random.default_rng(seed)
    samples = number * int(generator.integers(1, 4))
    dtype = generator.choice(["float64", "float64", "float64", "float32"])
    transposed = bool(generator.random() < 0.3)
    steps = int(generator.integers(3, 9))
    shapes = [(samples, 4), (6, samples) if transposed else (samples, 6), (4, 3), (3,)]
    arrays = [generator.normal(size=shape).astype(dtype) for shape in shapes]
    labels = generator.integers(0, 3, size=samples)

    def function(x: jax.Array, y: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array) -> Any:
        count = labels.shape[0]
        y_sizes = ((6, False), (1, True)) if transposed else ((1, True), (6, False))
        pool = [
            _Array(x, ((1, True), (4, False))),
            _Array(y, y_sizes),
            _Array(w, ((4, False), (3, False))),
            _Array(b, ((3, False),)),
        ]
        return _Author(seed, pool, labels, count).write(steps)

    return program(
        function=function,
        arguments=(*arrays, labels),
        dims=(0, 1 if transposed else 0, None, None, 0),
    )


@dataclass(frozen=True)
class Case:
    """A function, and the expected kinds of its results."""

    function: Callable[..., Any]
    arguments: str
    """letters of `_ARGUMENTS`"""
    kinds: str
    number: int = 2
    whole_is_known: bool = True


_SAMPLES = 4
_rng = np.random.default_rng(0)
_ARGUMENTS: dict[str, tuple[np.ndarray, int | None]] = {
    "x": (_rng.normal(size=(_SAMPLES, 3)), 0),
    "z": (_rng.normal(size=(_SAMPLES, 3)), 0),
    "t": (_rng.normal(size=(3, _SAMPLES)), 1),
    "i": (_rng.normal(size=(_SAMPLES, 6, 2)), 0),
    "m": (np.array([1.0, 0.0, 0.0, 1.0]), 0),
    "y": (np.array([2, 0, 1, 1]), 0),
    "k": (np.array([[1], [0], [2], [1]]), 0),
    "u": (np.array([[200], [100], [7], [250]], np.uint8), 0),
    "a": (np.array([True, False, False, True]), 0),
    "f": (_rng.normal(size=(_SAMPLES, 3)).astype(np.float32), 0),
    "g": (_rng.normal(size=(_SAMPLES, 3)).astype(jnp.bfloat16), 0),
    "c": (_rng.normal(size=(_SAMPLES, 3)) + 1j * _rng.normal(size=(_SAMPLES, 3)), 0),
    "w": (_rng.normal(size=(3,)), None),
    "v": (_rng.normal(size=(3, 5)), None),
    "b": (_rng.normal(size=(10, 3)), None),
    "q": (_rng.normal(size=(2, 2, 5)), None),
}


def _program(program: type, case: Case) -> Any:
    pairs = [_ARGUMENTS[letter] for letter in case.arguments]
    return program(
        function=case.function,
        arguments=tuple(array for array, _ in pairs),
        dims=tuple(dim for _, dim in pairs),
    )


def _rmse(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean((x @ w) ** 2))


def _cross_entropy(v: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    picked = jax.nn.log_softmax(x @ v)[jnp.arange(x.shape[0]), y]
    return -picked.mean()


def _taken(v: jax.Array, x: jax.Array, k: jax.Array) -> jax.Array:
    """As `optax.softmax_cross_entropy_with_integer_labels` takes the scores of the labels."""
    return -jnp.take_along_axis(x @ v, k, axis=1).take(0, axis=1).sum()


def _pool(i: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(i, -np.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def _convolved(i: jax.Array, q: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(i, q, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _grouped(i: jax.Array, q: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        i,
        q[:, :1, :4],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    )


def _spd(x: jax.Array) -> jax.Array:
    return x[:, :, None] * x[:, None, :] + 4 * jnp.eye(x.shape[1])


def _triangular_solve(matrix: jax.Array, sides: jax.Array) -> jax.Array:
    return jax.lax.linalg.triangular_solve(matrix, sides, left_side=True, lower=True)


_batch_norm = Primitive("batch_norm_inference")
_batch_norm.def_abstract_eval(lambda x, *_, feature: x)


def _lower_batch_norm(_: mlir.LoweringRuleContext, *operands: Any, feature: int) -> Any:
    epsilon = ir.FloatAttr.get_f32(1e-3)
    return stablehlo.BatchNormInferenceOp(*operands, epsilon, i64(feature)).results


mlir.register_lowering(_batch_norm, _lower_batch_norm)


def _normalised(
    x: jax.Array,
    w: Any,
    *,
    scale: Any = None,
    offset: Any = None,
    mean: Any = None,
    variance: Any = None,
    feature: int = 1,
) -> jax.Array:
    """XLA's batch norm with known moments, of numbers of the features that are none of None."""
    numbers = [w + 1, 3 - w, w, w**2]
    given = (scale, offset, mean, variance)
    numbers = [own if it is None else it for own, it in zip(numbers, given, strict=True)]
    return _batch_norm.bind(x, *numbers, feature=feature)


CASES: dict[str, Case] = {
    "batch norm": Case(lambda x, w: _normalised(x, w), "xw", "rows"),
    "batch norm, samples last": Case(lambda t, w: _normalised(t, w, feature=0), "tw", "rows"),
    "batch norm of parameters": Case(lambda v, w: _normalised(v, w, feature=0), "vw", "same"),
    "batch norm by a mean of samples": Case(
        lambda x, w: _normalised(x, w, mean=x.mean(0)), "xw", "mixed"
    ),
    "batch norm by a sum of squares of samples": Case(
        lambda x, w: _normalised(x, w, variance=(x**2).sum(0)), "xw", "mixed"
    ),
    "batch norm plus a mean of samples": Case(
        lambda x, w: _normalised(x, w, offset=x.mean(0)), "xw", "mixed"
    ),
    "batch norm times the size": Case(
        lambda x, w: _normalised(x, w, scale=w * x.shape[0]), "xw", "mixed"
    ),
    "batch norm of sums": Case(lambda x, w: _normalised(x.T @ x, w, mean=x.sum(0)), "xw", "step"),
    "batch norm of samples over the size": Case(
        lambda x, w: _normalised(
            x / x.shape[0], w, offset=jnp.zeros_like(w), mean=w / x.shape[0]
        ).sum(0),
        "xw",
        "sum",
    ),
    "batch norm of samples over the size, plus numbers": Case(
        lambda x, w: _normalised(x / x.shape[0], w), "xw", "mixed"
    ),
    "batch norm of features that are samples": Case(
        lambda x, m: _normalised(x, m, feature=0), "xm", "rows"
    ),
    "batch norm of parameters by samples": Case(
        lambda x, m: _normalised(jnp.ones_like(x), m, feature=0), "xm", "rows"
    ),
    "batch norm of samples by as many numbers": Case(
        lambda x, z: _normalised(x, z.sum(1), feature=0, mean=jnp.arange(1.0 * x.shape[0])),
        "xz",
        "mixed",
    ),
    "file: batch norm of samples by as many numbers": Case(
        lambda x, z: _normalised(x, z.sum(1), feature=0, mean=jnp.arange(1.0 * x.shape[0])),
        "xz",
        "mixed",
        whole_is_known=False,
    ),
    "sum": Case(lambda x: x.sum(0), "x", "sum"),
    "mean": Case(lambda x: x.mean(), "x", "sum"),
    "mean of one sample": Case(lambda x: x.mean(0), "x", "sum", number=4),
    "mean in f32": Case(lambda f: f.mean(), "f", "sum"),
    "mean in bf16": Case(lambda g: g.mean(), "g", "sum"),
    "sum of truth values": Case(lambda a: a.sum(), "a", "sum"),
    "or of truth values": Case(lambda a: jnp.any(a), "a", "mixed"),
    "complex sum": Case(lambda c: (c * 2j).sum(0), "c", "sum"),
    "real part of a complex mean": Case(lambda c: jnp.real(c.mean()), "c", "step"),
    "samples times a complex mean": Case(lambda c: jnp.real(c * c.mean()).sum(), "c", "mixed"),
    "time-major": Case(lambda t: (jnp.tanh(t), t.mean(1)), "t", "rows sum"),
    "maximum": Case(lambda x: x.max(), "x", "mixed"),
    "variance": Case(lambda x: x.var(0), "x", "mixed"),
    "moments": Case(lambda x: (x**2).mean(0) - x.mean(0) ** 2, "x", "step"),
    "unbiased": Case(lambda x: x.sum(0) / (x.shape[0] - 1), "x", "step"),
    "divided by a root of the size": Case(lambda x: x / np.sqrt(x.shape[0]), "x", "rows"),
    "integer mean": Case(lambda k: k.sum() // 2, "k", "step"),
    "half of the size": Case(lambda w, x: w * (x.shape[0] // 2), "wx", "same"),
    "sum as a truth value": Case(lambda k: (k.sum() - 4).astype(bool), "k", "step"),
    "overflowing bytes": Case(lambda u: u.sum(dtype=np.uint8).astype(np.float64), "u", "step"),
    "masked mean": Case(lambda x, m: (x.sum(1) * m).sum() / m.sum(), "xm", "step"),
    "gradient of a masked mean": Case(
        jax.grad(lambda w, x, m: ((x @ w) ** 2 * m).sum() / m.sum()), "wxm", "sum"
    ),
    "gradient of scores of labels": Case(jax.grad(_taken), "vxk", "sum"),
    "file: gradient of scores of labels": Case(
        jax.grad(_taken), "vxk", "sum", whole_is_known=False
    ),
    "constants in a column": Case(
        lambda x: (jnp.zeros_like(x).at[:, 1].set(2.0) * x[:, ::-1]).sum(1), "x", "rows"
    ),
    "constants in a row": Case(
        lambda x: (jnp.zeros_like(x).at[1].set(2.0) * x[:, ::-1]).sum(1), "x", "mixed"
    ),
    "column of constants": Case(
        lambda x: jnp.take(jnp.ones_like(x), jnp.array([2, 0]), axis=1) * x[:, :2], "x", "rows"
    ),
    "gradient of rmse": Case(jax.grad(_rmse), "wx", "sum"),
    "gradient of a bias under a root": Case(
        jax.grad(lambda w, x: jnp.sqrt(jnp.mean(x + w) ** 2 + 1)), "wx", "step"
    ),
    "gradient of a product under a square": Case(
        jax.grad(lambda v, x: jnp.mean(x @ v) ** 2), "vx", "sum"
    ),
    "samples times twice a sum": Case(lambda x: (x * (2 * x.sum())).sum(0), "x", "sum"),
    "samples over a mean": Case(lambda x: (x / x.mean()).sum(0), "x", "sum"),
    "samples minus a mean": Case(lambda x: x - x.mean(0), "x", "mixed"),
    "samples chosen by a sum": Case(lambda x: jnp.where(x > 0, x.sum(), 0.0).sum(), "x", "sum"),
    "sum repeated for the samples": Case(
        lambda x: jnp.broadcast_to(x.sum(), x.shape).sum(), "x", "step"
    ),
    "samples and themselves": Case(lambda x: x @ x.T, "x", "mixed"),
    "product over the samples": Case(lambda x, z: x.T @ z, "xz", "sum"),
    "product sample by sample": Case(lambda x, z: jnp.einsum("nk,nk->n", x, z), "xz", "rows"),
    "outer product": Case(lambda x, w: jnp.einsum("nk,l->lnk", x, w), "xw", "rows"),
    "product with a batch": Case(lambda x, v: jnp.einsum("nk,kl->ln", x, v), "xv", "rows"),
    "transpose": Case(lambda x: x.T, "x", "rows"),
    "flattened": Case(lambda x: x.reshape(-1) * 2, "x", "rows"),
    "flattened behind another dimension": Case(
        lambda t: t.reshape(-1).reshape(3, -1).sum(0), "t", "rows"
    ),
    "regrouped": Case(lambda x: x.reshape(3, -1).max(1), "x", "mixed"),
    "uniform rows flattened": Case(
        lambda x, w: jnp.max(jnp.broadcast_to(w, x.shape).reshape(-1) * x.reshape(-1)),
        "xw",
        "mixed",
    ),
    "two batches joined": Case(
        lambda x, z: jnp.concatenate([x, z])[: x.shape[0]] * 2, "xz", "rows"
    ),
    "two batches joined by features": Case(lambda x, z: jnp.concatenate([x, z], 1), "xz", "rows"),
    "batch and zeros joined": Case(
        lambda x: jnp.concatenate([x, jnp.zeros((1, 3))]).sum(0), "x", "mixed"
    ),
    "interleaved": Case(lambda x: x[::2], "x", "mixed"),
    "without the first": Case(lambda x: x[1:], "x", "mixed"),
    "reversed": Case(lambda x: x[::-1], "x", "mixed"),
    "features reversed": Case(lambda x: x[:, ::-1], "x", "rows"),
    "padded features": Case(lambda x: jnp.pad(x, ((0, 0), (1, 2))), "x", "rows"),
    "padded batch": Case(lambda x: jnp.pad(x, ((1, 0), (0, 0))), "x", "mixed"),
    "padded sum": Case(lambda x: jnp.pad(x.sum(0), (1, 0), constant_values=2.0), "x", "step"),
    "table at the size": Case(
        lambda b, x: b[x.shape[0] : x.shape[0] + 2].sum() * x.sum(), "bx", "step"
    ),
    "cumsum along the batch": Case(lambda x: x.cumsum(0), "x", "mixed"),
    "cumsum along features": Case(lambda x: x.cumsum(1), "x", "rows"),
    "sorted batch": Case(lambda x: jnp.sort(x, 0), "x", "mixed"),
    "sorted features": Case(lambda x: jnp.sort(x, 1), "x", "rows"),
    "median": Case(lambda x: jnp.median(x), "x", "mixed"),
    "largest features": Case(lambda x: jax.lax.top_k(x, 2), "x", "rows rows"),
    "largest samples": Case(lambda t: jax.lax.top_k(t, 1), "t", "mixed mixed"),
    "nearly largest features": Case(lambda x: jax.lax.approx_max_k(x, 2), "x", "rows rows"),
    "nearly least samples": Case(
        lambda x: jax.lax.approx_min_k(x, 1, reduction_dimension=0), "x", "mixed mixed"
    ),
    "argmax of features": Case(lambda x: x.argmax(1), "x", "rows"),
    "argmax of samples": Case(lambda x: x.argmax(0), "x", "mixed"),
    "embedding": Case(lambda b, y: b[y], "by", "rows"),
    "gradient of an embedding": Case(jax.grad(lambda b, y: jnp.tanh(b[y]).mean()), "by", "sum"),
    "largest written": Case(lambda x, y: jnp.zeros((3, 3)).at[y].max(x), "xy", "mixed"),
    "replaced rows": Case(lambda b, x, y: b.at[y].set(x), "bxy", "mixed"),
    "columns written": Case(lambda x: x.at[:, 1].set(0.5), "x", "rows"),
    "columns added": Case(lambda x: x.at[:, np.array([0, 2])].add(1.0), "x", "rows"),
    "labels picked": Case(lambda x, y: x[jnp.arange(x.shape[0]), y], "xy", "rows"),
    "labels picked backwards": Case(lambda x, y: x[jnp.arange(x.shape[0])[::-1], y], "xy", "mixed"),
    "labels picked along": Case(lambda x, k: jnp.take_along_axis(x, k, 1), "xk", "rows"),
    "labels picked from a mean": Case(
        lambda x, k: jnp.take_along_axis(jnp.broadcast_to(x.mean(0), x.shape), k, 1), "xk", "mixed"
    ),
    "samples picked": Case(lambda x, y: x[y], "xy", "mixed"),
    "features picked": Case(lambda x: x[:, np.array([2, 0])], "x", "rows"),
    "written by labels": Case(
        lambda x, y: jnp.zeros_like(x).at[jnp.arange(x.shape[0]), y].add(1.0), "xy", "rows"
    ),
    "one-hot": Case(lambda x, y: (x * jax.nn.one_hot(y, 3)).sum(1), "xy", "rows"),
    "positions added": Case(lambda x: x + jnp.arange(x.shape[0])[:, None], "x", "mixed"),
    "cross entropy": Case(jax.value_and_grad(_cross_entropy), "vxy", "sum sum"),
    "softmax of features": Case(lambda x: jax.nn.softmax(x), "x", "rows"),
    "softmax of samples": Case(lambda x: jax.nn.softmax(x, 0), "x", "mixed"),
    "contrastive": Case(lambda x, z: jnp.mean(jax.nn.logsumexp(x @ z.T, 1)), "xz", "mixed"),
    "pooled": Case(_pool, "i", "rows"),
    "gradient of pooling": Case(jax.grad(lambda i: (_pool(i) ** 2).sum()), "i", "rows"),
    "convolution": Case(_convolved, "iq", "rows"),
    "gradient of a kernel": Case(
        jax.grad(lambda q, i: (_convolved(i, q) ** 2).mean()), "qi", "sum"
    ),
    "gradient of a grouped kernel": Case(
        jax.grad(lambda q, i: (_grouped(i, q) ** 2).mean()), "qi", "sum"
    ),
    "convolution over samples": Case(
        lambda i, q: _convolved(jnp.swapaxes(i, 0, 1)[:, :, :2], q), "iq", "mixed"
    ),
    "update of a slice": Case(
        lambda x, m: jax.lax.dynamic_update_slice(x, m[:, None], (0, 1)), "xm", "rows"
    ),
    "update by a mean": Case(
        lambda x: jax.lax.dynamic_update_slice(
            x, jnp.broadcast_to(x.mean(), (x.shape[0], 1)), (0, 1)
        ),
        "x",
        "mixed",
    ),
    "one sample picked": Case(lambda x: jax.lax.dynamic_slice(x, (1, 0), (1, 3)), "x", "mixed"),
    "scan over features": Case(
        lambda t: jax.lax.scan(lambda c, r: (c + r, c * r), 0 * t[0], t), "t", "rows rows"
    ),
    "scan that adds up": Case(
        lambda t: jax.lax.scan(lambda c, r: (c + r.sum(), r), 0.0, t), "t", "sum rows"
    ),
    "scan over samples": Case(
        lambda x: jax.lax.scan(lambda c, r: (c + r, c), jnp.zeros(3), x), "x", "mixed mixed"
    ),
    "loop that mixes at last": Case(
        lambda x, w: jax.lax.fori_loop(0, 3, lambda n, c: (c[1], c[2], c[2] + x.max(0)), (w, w, w))[
            0
        ],
        "xw",
        "mixed",
    ),
    "loop as long as samples say": Case(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x), "x", "mixed"
    ),
    "branch of a parameter": Case(
        lambda x, w: jax.lax.cond(w[0] > 0, lambda: x, lambda: -x), "xw", "rows"
    ),
    "branch of a batch": Case(
        lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x), "x", "mixed"
    ),
    "branch of the step": Case(
        lambda x, w: jax.lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, w), "xw", "step"
    ),
    "branches of two kinds": Case(
        lambda x, w: jax.lax.cond(w[0] > 0, lambda: x.sum(0), lambda: w), "xw", "mixed"
    ),
    "loop of the step": Case(
        lambda x, w: jax.lax.fori_loop(0, 2, lambda n, c: c * (x.shape[0] + 1.0), w * x.mean()),
        "xw",
        "step",
    ),
    "transform of features": Case(lambda x: jnp.fft.fft(x), "x", "rows"),
    "transform of samples": Case(lambda t: jnp.fft.fft(t), "t", "mixed"),
    "transform of a sum": Case(lambda x: jnp.fft.irfft(jnp.fft.rfft(x.mean(0)), 3), "x", "sum"),
    "transform of a root of a sum": Case(
        lambda x: jnp.fft.rfft(jnp.sqrt(jnp.abs(x.sum(0)))), "x", "step"
    ),
    "cholesky": Case(lambda x: jnp.linalg.cholesky(_spd(x)), "x", "rows"),
    "triangular solve of a sum": Case(
        lambda w, x: _triangular_solve(jnp.diag(w), x.T @ x / x.shape[0]), "wx", "sum"
    ),
    "triangular solve by a sum": Case(
        lambda x: _triangular_solve(x.T @ x, x.T @ x / x.shape[0]), "x", "step"
    ),
    "solve": Case(lambda x: jnp.linalg.solve(_spd(x), x[:, :, None]), "x", "rows"),
    "eigenvalues of a covariance": Case(
        lambda x: jnp.linalg.eigvalsh(x.T @ x / x.shape[0]), "x", "step"
    ),
    "bits": Case(lambda f: jax.lax.bitcast_convert_type(f, np.uint8), "f", "mixed"),
    "mapped": Case(
        lambda x, y: jax.vmap(lambda r, n: jax.lax.dynamic_slice(r, (n,), (1,)))(x, y), "xy", "rows"
    ),
    "ones added up": Case(lambda x: x.sum(0) / jnp.ones(x.shape[0]).sum(), "x", "step"),
    "file: labels picked": Case(
        lambda x, y: x[jnp.arange(x.shape[0]), y], "xy", "rows", whole_is_known=False
    ),
    "file: labels picked backwards": Case(
        lambda x, y: x[jnp.arange(x.shape[0])[::-1], y], "xy", "mixed", whole_is_known=False
    ),
    "file: regrouped": Case(lambda x: x.reshape(3, -1).max(1), "x", "mixed", whole_is_known=False),
    "file: one sample rolled": Case(
        lambda x: jnp.roll(x, 1, 0), "x", "mixed", number=4, whole_is_known=False
    ),
    "file: sum repeated": Case(
        lambda x: jnp.broadcast_to(x.sum(), x.shape).sum(), "x", "mixed", whole_is_known=False
    ),
    "file: sum repeated under a window": Case(
        lambda x: jax.lax.reduce_window(
            jnp.broadcast_to(x.sum(), x.shape[:1]), 0.0, jax.lax.add, x.shape[:1], (1,), "valid"
        )[0],
        "x",
        "mixed",
        whole_is_known=False,
    ),
    "file: sum repeated and convolved": Case(
        lambda x: jax.lax.conv(
            jnp.broadcast_to(x.sum(), (1, 1, x.shape[0])),
            jnp.ones((1, 1, x.shape[0])),
            (1,),
            "VALID",
        ).sum(),
        "x",
        "mixed",
        whole_is_known=False,
    ),
    "file: features of a convolution repeated": Case(
        lambda x: jax.lax.conv(
            jnp.broadcast_to(x.sum(), (1, x.shape[0], 3)),
            jnp.ones((1, x.shape[0], 3)),
            (1,),
            "VALID",
        ).sum(),
        "x",
        "mixed",
        whole_is_known=False,
    ),
    "file: samples along two dimensions": Case(
        lambda x, m: jnp.concatenate([x, jnp.broadcast_to(m, (x.shape[0],) * 2)], 1).max(1),
        "xm",
        "mixed",
        whole_is_known=False,
    ),
}


_LONG = ("solve", "eigenvalues of a covariance", "loop that mixes at last")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _LONG)) for name in CASES]
)
def test_relations_of_a_case(check: Callable[..., Any], program: type, name: str) -> None:
    case = CASES[name]
    checked = check(_program(program, case), case.number, whole_is_known=case.whole_is_known)
    assert " ".join(it.kind for it in checked.results) == case.kinds
    assert checked.violations(only_results=not case.whole_is_known) == []
    if case.whole_is_known:
        assert checked.contradictions() == []


@pytest.mark.parametrize("seed", range(3))
def test_relations_of_a_random_program(check: Callable[..., Any], program: type, seed: int) -> None:
    number = 2 + seed % 3
    checked = check(_random_program(program, seed, number), number)
    assert checked.violations() == []
    assert checked.contradictions() == []


@pytest.mark.slow
@pytest.mark.parametrize("block", range(40))
def test_relations_of_many_random_programs(
    check: Callable[..., Any], split: Callable[..., str], program: type, block: int
) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        number = 2 + seed % 3
        made = _random_program(program, seed, number)
        checked = check(made, number)
        assert checked.violations() + checked.contradictions() == [], seed
        split(made, number)


_Rule = Callable[..., Any]
_ALL_DIMS = frozenset(range(2))


@dataclass(frozen=True)
class Fault:
    """A rule that claims too much, and a program that shows it.

    `apply` changes the rule until the test ends.
    """

    apply: Callable[[pytest.MonkeyPatch], None]
    function: Callable[..., Any]
    arguments: str
    whole_is_known: bool = True


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    """A function whose result `change` computes from the original's result and arguments."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(
        owner, name, lambda *args, **kwargs: change(original(*args, **kwargs), *args)
    )


def _rule(table: dict[str, _Rule], op: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    """A rule whose result `change` computes from the result and the operands' relations."""
    original = table[op]

    def changed(context: Any, op: Any, operands: Any) -> Any:
        return change(original(context, op, operands), operands)

    return lambda patch: patch.setitem(table, op, changed)


def _rows(dim: int = 0) -> Relation:
    return Relation(kind="rows", dim=dim)


def _claim(wrong: Relation) -> Callable[..., Any]:
    """Claims this where a rule refuses."""

    def change(right: Any, *_: Any) -> Any:
        if isinstance(right, list):
            return [wrong if it.is_mixed else it for it in right]
        return wrong if right.is_mixed else right

    return change


def _without_factors(right: Relation, *_: Any) -> Relation:
    return replace(right, factors=())


RULES = relate._RULES  # pyright: ignore[reportPrivateUsage]
SUM = Relation(kind="sum")
STEP_SUM = _claim(SUM)

FAULTS: dict[str, Fault] = {
    "a batch norm is linear in x alone": Fault(
        _rule(
            RULES,
            "stablehlo.batch_norm_inference",
            lambda right, operands: _rows().with_scale(operands[0].scaled),
        ),
        lambda x, w: _normalised(x / x.shape[0], w),
        "xw",
    ),
    "a batch norm by moments of the samples is theirs": Fault(
        _rule(RULES, "stablehlo.batch_norm_inference", _claim(_rows())),
        lambda x, w: _normalised(x, w, mean=x.mean(0)),
        "xw",
    ),
    "features of a batch norm are no samples": Fault(
        _wrapped(
            elementwise, "_spread", lambda right, *_: replace(right, kind="same", free=_ALL_DIMS)
        ),
        lambda x, m: _normalised(jnp.ones((3, x.shape[0])), m).max(0).sum(),
        "xm",
    ),
    "a maximum over samples is a sum": Fault(
        _rule(RULES, "stablehlo.reduce", STEP_SUM), lambda x: x.max(0), "x"
    ),
    "a sum of integers is a mean": Fault(
        _wrapped(Context, "power_of_sums", lambda *_: -1), lambda x: x.sum(0), "x"
    ),
    "a quotient has the power of its numerator": Fault(
        _wrapped(Relation, "over", lambda right, x, y: x.scaled), lambda x: x.mean(), "x"
    ),
    "a quotient has the inverse power": Fault(
        _wrapped(Relation, "over", lambda right, x, y: x.times(y)), lambda x: x.mean(), "x"
    ),
    "a product has the power of one factor": Fault(
        _wrapped(Relation, "times", lambda right, x, y: x.scaled),
        lambda x: x.shape[0] * (2.0 * x.shape[0] * x),
        "x",
    ),
    "numbers made of the size are the same": Fault(
        _wrapped(shapes, "_power", lambda *_: 0), lambda x: x.mean(), "x"
    ),
    "a power passes what is not linear": Fault(
        _wrapped(elementwise, "_scale", lambda right, op, operands: right or operands[0].scaled),
        lambda x: jnp.tanh(x / x.shape[0]),
        "x",
    ),
    "a function of a sum is a sum": Fault(
        _wrapped(elementwise, "_of_sums", lambda right, *_: SUM), lambda x: x.sum() ** 2, "x"
    ),
    "what is the same is added to a sum once per micro-batch": Fault(
        _wrapped(elementwise, "_of_sums", lambda right, *_: SUM), lambda x: x.sum() + 1, "x"
    ),
    "integers are divided as numbers": Fault(
        _wrapped(elementwise, "_is_quotient", lambda _, op: op.name == "stablehlo.divide"),
        lambda k: k.sum() // 2,
        "k",
    ),
    "a truth value is linear": Fault(
        _wrapped(elementwise, "_is_linear", lambda *_: True),
        lambda k: (k.sum() - 2).astype(bool),
        "k",
    ),
    "what is taken out is no factor": Fault(
        _wrapped(Context, "taken_out", _without_factors), lambda x: (x * x.mean()).sum(0), "x"
    ),
    "factors are lost by a reduction": Fault(
        _rule(RULES, "stablehlo.reduce", _without_factors),
        lambda x: (x * x.mean()).sum(0),
        "x",
    ),
    "a root stays when a sum is scaled": Fault(
        _wrapped(
            elementwise,
            "_of_sums",
            lambda right, context, op, operands: replace(right, root=operands[-1].root),
        ),
        lambda x: (x * (2 * x.sum())).sum(0),
        "x",
    ),
    "a repeated sum is a sum": Fault(
        _wrapped(Context, "_agree", lambda right, _, op, it, *__: it if it.of_step else right),
        lambda x: jnp.broadcast_to(x.sum(), x.shape[:1]).sum(),
        "x",
    ),
    "shapes in the whole batch do not matter": Fault(
        _wrapped(Context, "_agree", lambda right, _, op, it, *__: it),
        lambda w, x: jnp.concatenate([w, jnp.zeros(x.shape[0])]),
        "wx",
    ),
    "samples stay along their dimension in a transpose": Fault(
        _rule(RULES, "stablehlo.transpose", lambda right, of: replace(right, dim=of[0].dim)),
        lambda x: x.T,
        "x",
        whole_is_known=False,
    ),
    "samples stay along their dimension in a reshape": Fault(
        _wrapped(shapes, "_place", lambda right, context, op, x, *_: (x.dim, x.outer)),
        lambda x: x.reshape(3, -1),
        "x",
        whole_is_known=False,
    ),
    "a reshape has one block": Fault(
        _wrapped(shapes, "_place", lambda right, *_: right and (right[0], 1)),
        lambda t: t.reshape(-1),
        "t",
    ),
    "a reshaped array is equal everywhere": Fault(
        _wrapped(shapes, "_reshaped_free", lambda right, old, new, _: frozenset(range(len(new)))),
        lambda b, x: b.reshape(-1),
        "bx",
    ),
    "a broadcast array is equal everywhere": Fault(
        _rule(RULES, "stablehlo.broadcast_in_dim", lambda right, _: replace(right, free=_ALL_DIMS)),
        lambda w, x: jnp.broadcast_to(w, x.shape),
        "wx",
    ),
    "numbers of samples are the same": Fault(
        _rule(RULES, "stablehlo.iota", lambda right, _: replace(SAME, free=frozenset({0}))),
        lambda x: x * jnp.arange(x.shape[0])[:, None],
        "x",
    ),
    "numbers of samples can be reckoned with": Fault(
        _wrapped(elementwise, "_of_positions", lambda *_: _rows()),
        lambda x: jnp.arange(x.shape[0]) + 1,
        "x",
    ),
    "joined batches have one block": Fault(
        _rule(
            RULES,
            "stablehlo.concatenate",
            lambda right, _: right if right.is_mixed else replace(right, outer=1),
        ),
        lambda x, z: jnp.concatenate([x, z]),
        "xz",
    ),
    "samples are joined with other rows": Fault(
        _rule(RULES, "stablehlo.concatenate", _claim(_rows())),
        lambda x: jnp.concatenate([x, jnp.ones((2, 3))]),
        "x",
        whole_is_known=False,
    ),
    "some samples are all samples": Fault(
        _rule(RULES, "stablehlo.slice", lambda right, of: of[0]),
        lambda x: x[1:],
        "x",
        whole_is_known=False,
    ),
    "a place that depends on the size is the same": Fault(
        _wrapped(shapes, "by_size", lambda right, op, x, *_: x),
        lambda b, x: b[x.shape[0] : x.shape[0] + 2],
        "bx",
    ),
    "reversed samples are samples": Fault(
        _rule(RULES, "stablehlo.reverse", lambda right, of: of[0]), lambda x: x[::-1], "x"
    ),
    "padded samples are samples": Fault(
        _rule(RULES, "stablehlo.pad", _claim(_rows())),
        lambda x: jnp.pad(x, ((1, 1), (0, 0))),
        "x",
        whole_is_known=False,
    ),
    "a padded sum is a sum": Fault(
        _rule(RULES, "stablehlo.pad", lambda right, of: of[0]),
        lambda x: jnp.pad(x.sum(0), (1, 0), constant_values=2.0),
        "x",
    ),
    "a product over samples is rows": Fault(
        _rule(
            RULES,
            "stablehlo.dot_general",
            lambda right, _: _rows() if right.kind == "sum" else right,
        ),
        lambda x, z: x.T @ z,
        "xz",
        whole_is_known=False,
    ),
    "a product of all samples with all is rows": Fault(
        _rule(RULES, "stablehlo.dot_general", _claim(_rows())),
        lambda x, z: x @ z.T,
        "xz",
        whole_is_known=False,
    ),
    "the gradient of a kernel is the same": Fault(
        _rule(
            RULES,
            "stablehlo.convolution",
            lambda right, _: SAME if right.kind == "sum" else right,
        ),
        jax.grad(lambda q, i: (_convolved(i, q) ** 2).sum()),
        "qi",
    ),
    "windows over samples are rows": Fault(
        _wrapped(contractions, "one_wide", lambda *_: True), lambda x: x.cumsum(0), "x"
    ),
    "rows picked of the samples are samples": Fault(
        _rule(RULES, "stablehlo.gather", _claim(_rows())), lambda x, y: x[y], "xy"
    ),
    "constants written in a row are in all rows": Fault(
        _rule(
            RULES, "stablehlo.scatter", lambda right, *_: replace(right, free=frozenset(range(2)))
        ),
        lambda x: jnp.zeros_like(x).at[1].set(2.0) * x,
        "x",
        whole_is_known=False,
    ),
    "labels of all samples write rows": Fault(
        _rule(RULES, "stablehlo.scatter", _claim(_rows())),
        lambda x, y: jnp.zeros_like(x).at[y].set(x),
        "xy",
    ),
    "what is written in one place is a sum": Fault(
        _rule(RULES, "stablehlo.scatter", STEP_SUM),
        lambda b, x, y: b.at[y].add(x),
        "bxy",
    ),
    "counted rows are picked in any order": Fault(
        _rule(RULES, "stablehlo.reverse", lambda right, of: of[0]),
        lambda x, y: x[jnp.arange(x.shape[0])[::-1], y],
        "xy",
    ),
    "one sample is all samples": Fault(
        _wrapped(indexing, "_whole_dimension", lambda *_: True),
        lambda x: jax.lax.dynamic_slice(x, (1, 0), (1, 3)),
        "x",
        whole_is_known=False,
    ),
    "sorted samples are samples": Fault(
        _rule(RULES, "stablehlo.sort", _claim(_rows())), lambda x: jnp.sort(x, 0), "x"
    ),
    "the largest samples are the same": Fault(
        _rule(RULES, "chlo.top_k", _claim(SAME)), lambda t: jax.lax.top_k(t, 1), "t"
    ),
    "a transform of samples is rows": Fault(
        _wrapped(matrices, "of_matrices", _claim(_rows(1))),
        lambda t: jnp.real(jnp.fft.fft(t)),
        "t",
        whole_is_known=False,
    ),
    "a solve by a sum is a sum": Fault(
        _wrapped(matrices, "triangular_solve", lambda *_: SUM),
        lambda x: _triangular_solve(x.T @ x, x.T @ x),
        "x",
    ),
    "a loop that mixes at last does not": Fault(
        _wrapped(relate, "_join", lambda right, op, a, b: a),
        lambda x, w: jax.lax.fori_loop(0, 3, lambda n, c: (c[1], c[2], c[2] + x.max(0)), (w, w, w))[
            0
        ],
        "xw",
    ),
    "any sample may say which branch is taken": Fault(
        lambda patch: _taken_by_anything(patch),
        lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x),
        "x",
    ),
    "what is one number is zero": Fault(
        lambda patch: patch.setattr(Relation, "is_zero", property(lambda it: it.splat is not None)),
        lambda x: x.sum() + 1,
        "x",
    ),
    "rows of other samples are rows of these": Fault(
        _wrapped(Relation, "rows_at", lambda right, it, *_: it.kind == "rows"),
        lambda x, z: jnp.concatenate([x, x]) + jnp.repeat(z, 2, 0),
        "xz",
    ),
}


def _taken_by_anything(patch: pytest.MonkeyPatch) -> None:
    original = relate._branches  # pyright: ignore[reportPrivateUsage]
    patch.setattr(relate, "_branches", lambda context, op, predicate: original(context, op, SAME))


def _checked(check: Callable[..., Any], program: type, fault: Fault) -> Any:
    case = Case(fault.function, fault.arguments, "")
    return check(_program(program, case), case.number, whole_is_known=fault.whole_is_known)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_rule_is_found(
    check: Callable[..., Any], program: type, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    FAULTS[name].apply(monkeypatch)
    assert _checked(check, program, FAULTS[name]).violations() != []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_right_rule_is_not(check: Callable[..., Any], program: type, name: str) -> None:
    assert _checked(check, program, FAULTS[name]).violations(only_results=True) == []
