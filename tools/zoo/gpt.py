"""GPT: a pre-LN decoder with learned positions and a GELU feed-forward of four times the width.

Sizes: Alpa (OSDI'22), table 6: vocabulary 51200, 1024 tokens, f16 with f32 master weights. The
output projection is tied to the embedding, as in Megatron-LM, unless `tied` is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from alpa.tools.zoo.program import KEY, Input


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 51200
    sequence_length: int = 1024
    mlp_factor: int = 4
    tied: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float16
    global_batch_size: int = 1024

    def model(self) -> nn.Module:
        return GPT(self)

    def inputs(self) -> Mapping[str, Input]:
        tokens = Input(shape=(self.sequence_length,), dtype=np.int32, below=self.vocab_size)
        batch = {"tokens": tokens, "targets": tokens}
        return {**batch, "dropout": KEY} if self.dropout else batch


class Attention(nn.Module):
    """Causal self-attention: [batch, tokens, hidden] -> the same."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        head_size = c.hidden_size // c.num_heads
        # One projection for query, key and value; the heads are a dimension of its kernel.
        qkv = nn.DenseGeneral((c.num_heads, 3 * head_size), dtype=c.dtype, name="qkv")(x)
        query, key, value = jnp.split(qkv, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_size**-0.5, key)
        # Built in every layer: a layer's own mask costs less than one sent between stages.
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(causal, scores, jnp.finfo(c.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.DenseGeneral(c.hidden_size, axis=(-2, -1), dtype=c.dtype, name="out")(mixed)


class FeedForward(nn.Module):
    """Two dense layers with a GELU between: [batch, tokens, hidden] -> the same."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        x = nn.Dense(c.mlp_factor * c.hidden_size, dtype=c.dtype, name="in")(x)
        return nn.Dense(c.hidden_size, dtype=c.dtype, name="out")(nn.gelu(x))


class Block(nn.Module):
    """One decoder layer: [batch, tokens, hidden] -> the same."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=c.dropout == 0)
        x += dropout(Attention(c)(nn.LayerNorm(dtype=c.dtype)(x)))
        return x + dropout(FeedForward(c)(nn.LayerNorm(dtype=c.dtype)(x)))


class Vocabulary(nn.Module):
    """Both ends of a decoder: tokens to vectors, and vectors to logits."""

    config: GPTConfig

    def setup(self) -> None:
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, dtype=c.dtype)
        self.positions = self.param(
            "positions", nn.initializers.normal(0.02), (c.sequence_length, c.hidden_size)
        )
        self.norm = nn.LayerNorm(dtype=c.dtype)
        if not c.tied:
            self.output = nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, tokens] -> [batch, tokens, hidden]"""
        return self.embed(tokens) + self.positions.astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, hidden] -> [batch, tokens, vocabulary]"""
        x = self.norm(x)
        return self.embed.attend(x) if self.config.tied else self.output(x)


class GPT(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits: [batch, tokens] -> [batch, tokens, vocabulary]."""
        vocabulary = Vocabulary(self.config)
        x = vocabulary(tokens)
        for layer in range(self.config.num_layers):
            x = Block(self.config, name=f"layer_{layer:02}")(x)
        return vocabulary.logits(x)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(self(tokens), targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all targets, in f32. One-hot, not gathered: the classes can then be sharded."""
    labels = jax.nn.one_hot(targets, logits.shape[-1])
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels).mean()
