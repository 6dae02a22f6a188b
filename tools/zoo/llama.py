"""Llama 3: a pre-norm decoder with RMS norm, rotary positions, grouped-query attention and SwiGLU.

Sizes: Grattafiori et al. 2024 (arXiv 2407.21783), table 3, with the 128256 entries of the released
vocabulary (the table's 128000 and 256 special tokens). 8192 tokens, bf16 with f32 master weights;
512 samples are the 4M tokens of the paper's first batches (section 3.4.1). No biases; the output
projection is not the embedding.

In the shapes below b is the batch, q and k tokens, h the key-value head, g the query head among
those that share it, d the position in a head.
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
class LlamaConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int = 128256
    sequence_length: int = 8192
    rope_theta: float = 500_000.0
    dtype: Any = jnp.bfloat16
    global_batch_size: int = 512

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads with {self.num_kv_heads} key-value heads do not divide a "
                f"hidden size of {self.hidden_size}; num_kv_heads must divide num_heads, and "
                "2 * num_heads the hidden size"
            )

    def model(self) -> nn.Module:
        return Llama(self)

    def inputs(self) -> Mapping[str, Input]:
        tokens = Input(shape=(self.sequence_length,), dtype=np.int32, below=self.vocab_size)
        return {"tokens": tokens, "targets": tokens}


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): [batch, tokens, ..., d] -> the same.

    Entries i and i + d/2 of the token at position p are a pair, turned by p * theta^(-2i/d), so
    that the product of a query and a key depends on the distance of their positions.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None] * frequency
    angle = angle.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    # The angles need f32; the type of the rest is enough for their sines.
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nn.Module):
    """Causal self-attention: [batch, tokens, hidden] -> the same."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        head_size = c.hidden_size // c.num_heads
        project = partial(nn.DenseGeneral, use_bias=False, dtype=c.dtype)
        # The group is a dimension of its own, so that keys and values are never repeated.
        group_size = c.num_heads // c.num_kv_heads
        query = project((c.num_kv_heads, group_size, head_size), name="query")(x)
        key = project((c.num_kv_heads, head_size), name="key")(x)
        value = project((c.num_kv_heads, head_size), name="value")(x)
        query, key = rotate(query, c.rope_theta), rotate(key, c.rope_theta)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query * head_size**-0.5, key)
        # Built in every layer, as are the angles: this costs less than sending them between stages.
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(causal, scores, jnp.finfo(c.dtype).min)
        mixed = jnp.einsum("bhgqk,bkhd->bqhgd", nn.softmax(scores), value)
        return project(c.hidden_size, axis=(-3, -2, -1), name="out")(mixed)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): [batch, tokens, hidden] -> the same."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = partial(nn.Dense, use_bias=False, dtype=c.dtype)
        gate = nn.silu(dense(c.mlp_size, name="gate")(x))
        return dense(c.hidden_size, name="out")(gate * dense(c.mlp_size, name="in")(x))


def norm(config: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-5, dtype=config.dtype, name=name)


class Block(nn.Module):
    """One decoder layer: [batch, tokens, hidden] -> the same."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        x += Attention(c, name="attention")(norm(c, "attention_norm")(x))
        return x + FeedForward(c, name="feed_forward")(norm(c, "feed_forward_norm")(x))


class Llama(nn.Module):
    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits: [batch, tokens] -> [batch, tokens, vocabulary]."""
        c = self.config
        x = nn.Embed(c.vocab_size, c.hidden_size, dtype=c.dtype, name="embed")(tokens)
        for layer in range(c.num_layers):
            x = Block(c, name=f"layer_{layer:02}")(x)
        x = norm(c, "norm")(x)
        return nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype, name="output")(x)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(self(tokens), targets)
