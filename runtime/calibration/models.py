"""Small training steps whose plans show what programs reach of the figures of single ops.

They have what training steps have in common: layers of products, attention or convolutions with
norms between them, their gradients, and an optimizer with two moments. Their weights are few, so
that they compile fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import Argument, Result, ResultRole, write_interface
from alpa.passes.simplify.gradients import mark_gradients
from alpa.passes.simplify.inline import inline_calls

Weights = dict[str, jax.Array]
_RATE, _DECAY, _HEADS = 1e-3, 0.9, 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """Layers of one kind, and a batch."""

    kind: str
    """`attention`, `convolution`"""
    width: int
    """channels"""
    length: int
    """tokens of a sequence, or rows and columns of an image"""
    batch: int
    dtype: str = "float32"
    """of the layers; weights and the optimizer's state are f32"""
    layers: int = 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the batch, which is also that of the targets."""
        if self.kind == "attention":
            return (self.batch, self.length, self.width)
        return (self.batch, self.length, self.length, self.width)

    def weights(self) -> list[Weights]:
        """Random weights of each layer."""
        rng, c = np.random.default_rng(0), self.width
        shapes = {
            "attention": {
                "query": (c, c), "key": (c, c), "value": (c, c), "out": (c, c),
                "up": (c, 4 * c), "down": (4 * c, c), "wide": (4 * c,),
            },
            "convolution": {"first": (3, 3, c, c), "second": (3, 3, c, c)},
        }[self.kind]  # fmt: skip
        shapes = {**shapes, "bias": (c,), "bias2": (c,), "scale": (c,), "scale2": (c,)}

        def draw(shape: tuple[int, ...]) -> jax.Array:
            values = rng.standard_normal(shape) * np.prod(shape[:-1]) ** -0.5
            return jnp.asarray(values if len(shape) > 1 else np.ones(shape), jnp.float32)

        return [{name: draw(it) for name, it in shapes.items()} for _ in range(self.layers)]

    def arguments(self) -> list[np.ndarray]:
        """Those of the first step, in the order of `lower`."""
        rng = np.random.default_rng(1)
        batch = [np.asarray(rng.standard_normal(self.shape), np.float32) for _ in range(2)]
        return [*map(np.asarray, jax.tree.leaves(_state(self.weights()))), *batch]

    def lower(self) -> ir.Module:
        """The training step, with the roles of its arguments."""
        layer = {"attention": _attention, "convolution": _convolution}[self.kind]

        def step(state: Any, x: jax.Array, targets: jax.Array) -> Any:
            def loss(weights: list[Weights]) -> jax.Array:
                y = x.astype(self.dtype)
                for each in weights:
                    y = layer({name: it.astype(self.dtype) for name, it in each.items()}, y)
                return jnp.square(y.astype(targets.dtype) - targets).mean()

            return _updated(loss, state)

        batch = jax.ShapeDtypeStruct(self.shape, jnp.float32)
        state = jax.eval_shape(lambda: _state(self.weights()))
        traced = jax.jit(step, donate_argnums=0, keep_unused=True).trace(state, batch, batch)
        module = cast(ir.Module, traced.lower().compiler_ir("stablehlo"))
        number = len(jax.tree.leaves(state))
        with module.context:
            inline_calls(module, main_function(module))
            mark_gradients(body(main_function(module)))
            write_interface(
                main_function(module),
                [Argument(role="state", aliasing_output=n) for n in range(number)]
                + [Argument(role="batch", batch_dim=0)] * 2,
                [Result(role=ResultRole("state", n)) for n in range(number)]
                + [Result(role=ResultRole("mean"))],
            )
        return module


def _state(weights: list[Weights]) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return weights, zeros, zeros


def _updated(loss: Callable[[list[Weights]], jax.Array], state: Any) -> Any:
    """The state after a step of the optimizer, and the loss."""
    weights, first, second = state
    value, gradients = jax.value_and_grad(loss)(weights)
    first = jax.tree.map(lambda m, g: _DECAY * m + (1 - _DECAY) * g, first, gradients)
    second = jax.tree.map(lambda v, g: _DECAY * v + (1 - _DECAY) * g * g, second, gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - _RATE * m / (jnp.sqrt(v) + 1e-6), weights, first, second
    )
    return (weights, first, second), value


def _norm(x: jax.Array, scale: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-6) * scale


def _attention(w: Weights, x: jax.Array) -> jax.Array:
    """A transformer's layer on [batch, tokens, channels]."""
    normal = _norm(x, w["scale"], (-1,))
    heads = (*x.shape[:-1], _HEADS, x.shape[-1] // _HEADS)
    query, key, value = ((normal @ w[name]).reshape(heads) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * heads[-1] ** -0.5
    read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    x = x + read.reshape(x.shape) @ w["out"] + w["bias"]
    hidden = jax.nn.gelu(_norm(x, w["scale2"], (-1,)) @ w["up"] + w["wide"])
    return x + hidden @ w["down"] + w["bias2"]


def _convolution(w: Weights, x: jax.Array) -> jax.Array:
    """A residual network's block on [batch, rows, columns, channels], with batch norms."""
    y = jax.nn.relu(_norm(_convolved(x, w["first"]), w["scale"], (0, 1, 2)) + w["bias"])
    return jax.nn.relu(x + _norm(_convolved(y, w["second"]), w["scale2"], (0, 1, 2)) + w["bias2"])


def _convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
