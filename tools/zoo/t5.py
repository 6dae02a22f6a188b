"""T5: an encoder and a decoder with relative position biases, RMS norm and no biases.

Sizes: Raffel et al. 2020 (JMLR 21), section 3.7, with its 512 input tokens; targets are cut to 128.
bf16 with f32 master weights. The position biases are learned once per stack and shared by its
layers, and the embedding is shared by both stacks and the output. `gated` replaces the ReLU of the
feed-forward part by a gated GELU, as in T5 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from alpa.tools.zoo.gpt import cross_entropy
from alpa.tools.zoo.program import Input


@dataclass(frozen=True, kw_only=True)
class T5Config:
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    head_size: int = 64
    vocab_size: int = 32128
    source_length: int = 512
    target_length: int = 128
    num_buckets: int = 32
    max_distance: int = 128
    gated: bool = False
    dtype: Any = jnp.bfloat16
    global_batch_size: int = 128

    def model(self) -> nn.Module:
        return T5(self)

    def inputs(self) -> Mapping[str, Input]:
        def tokens(length: int) -> Input:
            return Input(shape=(length,), dtype=np.int32, below=self.vocab_size)

        return {
            "source": tokens(self.source_length),
            "decoder_input": tokens(self.target_length),
            "targets": tokens(self.target_length),
        }


def relative_bucket(
    distance: jax.Array, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """The bucket of each distance (key position - query position).

    Half of a direction's buckets hold one distance each; the others grow logarithmically up to
    `max_distance`. The decoder has no buckets for later positions.
    """
    offset = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    scale = (num_buckets - exact) / np.log(max_distance / exact)
    # The maximum keeps the logarithm finite for distances that have their own bucket.
    far = jnp.log(jnp.maximum(distance, exact).astype(jnp.float32) / exact) * scale
    far = jnp.minimum(exact + far.astype(jnp.int32), num_buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)


class PositionBias(nn.Module):
    """The bias of one stack's attention scores: [heads, tokens, tokens]."""

    config: T5Config
    causal: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        c = self.config
        position = jnp.arange(length)
        distance = position[None, :] - position[:, None]
        bucket = relative_bucket(
            distance,
            bidirectional=not self.causal,
            num_buckets=c.num_buckets,
            max_distance=c.max_distance,
        )
        init = nn.initializers.normal(0.02)
        # One-hot, not gathered: the gradient is then a product instead of a scatter.
        table = self.param("table", init, (c.num_buckets, c.num_heads)).astype(c.dtype)
        bias = jnp.einsum(
            "qkb,bh->hqk", jax.nn.one_hot(bucket, c.num_buckets, dtype=c.dtype), table
        )
        return jnp.where(distance > 0, jnp.finfo(c.dtype).min, bias) if self.causal else bias


class Attention(nn.Module):
    """Unscaled attention: [batch, tokens, hidden] over `memory` -> [batch, tokens, hidden]."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        c = self.config

        project = partial(
            nn.DenseGeneral, (c.num_heads, c.head_size), use_bias=False, dtype=c.dtype
        )
        query, key = project(name="query")(x), project(name="key")(memory)
        value = project(name="value")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores += bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.DenseGeneral(
            c.hidden_size,
            axis=(-2, -1),
            use_bias=False,
            dtype=c.dtype,
            name="out",
        )(mixed)


class FeedForward(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config

        def dense(size: int, name: str) -> nn.Dense:
            return nn.Dense(size, use_bias=False, dtype=c.dtype, name=name)

        y = dense(c.mlp_size, "in")(x)
        y = nn.gelu(y) * dense(c.mlp_size, "gate")(x) if c.gated else nn.relu(y)
        return dense(c.hidden_size, "out")(y)


class Layer(nn.Module):
    """A layer of the encoder or, given the encoder's `memory`, of the decoder."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        c = self.config
        y = nn.RMSNorm(dtype=c.dtype)(x)
        x += Attention(c, name="self_attention")(y, y, bias)
        if memory is not None:
            x += Attention(c, name="cross_attention")(nn.RMSNorm(dtype=c.dtype)(x), memory)
        return x + FeedForward(c)(nn.RMSNorm(dtype=c.dtype)(x))


class T5(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, source: jax.Array, decoder_input: jax.Array) -> jax.Array:
        """Logits: [batch, source tokens], [batch, tokens] -> [batch, tokens, vocabulary]."""
        c = self.config
        embed = nn.Embed(c.vocab_size, c.hidden_size, dtype=c.dtype)
        memory = embed(source)
        bias = PositionBias(c, causal=False, name="encoder_bias")(c.source_length)
        for layer in range(c.num_layers):
            memory = Layer(c, name=f"encoder_{layer:02}")(memory, bias)
        memory = nn.RMSNorm(dtype=c.dtype, name="encoder_norm")(memory)

        x = embed(decoder_input)
        bias = PositionBias(c, causal=True, name="decoder_bias")(c.target_length)
        for layer in range(c.num_layers):
            x = Layer(c, name=f"decoder_{layer:02}")(x, bias, memory)
        x = nn.RMSNorm(dtype=c.dtype, name="decoder_norm")(x)
        # T5 scales the input of the tied embedding.
        return embed.attend(x * c.hidden_size**-0.5)

    def loss(self, source: jax.Array, decoder_input: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(self(source, decoder_input), targets)
