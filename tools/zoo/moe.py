"""GShard MoE: a GPT in which every second layer has a mixture of experts for its feed-forward part.

Gating, capacity, einsum dispatch and the auxiliary loss follow GShard (Lepikhin et al. 2020,
algorithm 1 and section 3.2) without its random choice of the second expert. A group is a sequence,
so that the loss of a batch is exactly the mean over its micro-batches.

Sizes: Alpa (OSDI'22), table 7: vocabulary 32000, 1024 tokens, f16 with f32 master weights. The
names give the number of parameters if the feed-forward parts have eight times the width, as in
Alpa's benchmark.

In the shapes below g is the group (the batch), s the token, e the expert, c the slot in an expert's
buffer, m the hidden size and h the width of the feed-forward part.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from alpa.tools.zoo.gpt import Attention, FeedForward, GPTConfig, Vocabulary, cross_entropy


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    num_experts: int
    vocab_size: int = 32000
    mlp_factor: int = 8
    capacity_factor: int = 2
    auxiliary_weight: float = 0.01

    @property
    def capacity(self) -> int:
        """Tokens of one group that an expert takes; the rest skip it."""
        return self.capacity_factor * self.sequence_length // self.num_experts

    def model(self) -> nn.Module:
        return MoE(self)


def top2_gating(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The weight of each token at each slot, and the auxiliary loss: [g, s, e] -> [g, s, e, c], [].

    The first choices of a group fill an expert's slots in the order of the tokens; the second
    choices come after them, and tokens without a slot are dropped. The loss is the mean over the
    groups of sum_e(share of first choices * mean gate) * experts: 1 if the experts are in balance.
    """
    num_tokens, num_experts = gates.shape[1:]
    # earlier[s, t]: token s comes before t. A product with it is a running count, without a scan.
    earlier = jnp.triu(jnp.ones((num_tokens, num_tokens)), 1)

    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), num_experts)
    others = gates * (1 - first)
    second = jax.nn.one_hot(jnp.argmax(others, axis=-1), num_experts)
    balance = (first.mean(axis=1) * gates.mean(axis=1)).sum(axis=-1).mean() * num_experts

    position_first = jnp.einsum("gse,st->gte", first, earlier)
    position_second = jnp.einsum("gse,st->gte", second, earlier)
    position_second += first.sum(axis=1, keepdims=True)
    weight_first = (gates * first).sum(axis=-1, keepdims=True)
    weight_second = (others * second).sum(axis=-1, keepdims=True)
    total = weight_first + weight_second

    def slots(choice: jax.Array, weight: jax.Array, position: jax.Array) -> jax.Array:
        # one_hot is zero where the position is beyond the capacity: the token is dropped.
        place = jax.nn.one_hot((position * choice).sum(axis=-1).astype(jnp.int32), capacity)
        return jnp.einsum("gse,gsc->gsec", choice * weight / total, place)

    combine = slots(first, weight_first, position_first)
    return combine + slots(second, weight_second, position_second), balance


class Experts(nn.Module):
    """[g, s, m] -> [g, s, m] and the auxiliary loss; the gates are computed in f32."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        width = c.mlp_factor * c.hidden_size
        normal = nn.initializers.normal(0.02)
        w_in = self.param("in", normal, (c.num_experts, c.hidden_size, width)).astype(c.dtype)
        w_out = self.param("out", normal, (c.num_experts, width, c.hidden_size)).astype(c.dtype)

        gate = nn.Dense(c.num_experts, use_bias=False, name="gate")
        gates = nn.softmax(gate(x.astype(jnp.float32)))
        combine, auxiliary = top2_gating(gates, c.capacity)
        dispatch = (combine > 0).astype(c.dtype)

        y = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        y = nn.gelu(jnp.einsum("egcm,emh->egch", y, w_in))
        y = jnp.einsum("egch,ehm->egcm", y, w_out)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(c.dtype), y), auxiliary


class Block(nn.Module):
    """One decoder layer: [batch, tokens, hidden] -> the same, and the losses of its experts."""

    config: MoEConfig
    mixture: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=c.dropout == 0)
        x += dropout(Attention(c)(nn.LayerNorm(dtype=c.dtype)(x)))
        normed = nn.LayerNorm(dtype=c.dtype)(x)
        if not self.mixture:
            return x + dropout(FeedForward(c)(normed)), []
        y, auxiliary = Experts(c)(normed)
        return x + dropout(y), [auxiliary]


class MoE(nn.Module):
    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, tokens] -> logits [batch, tokens, vocabulary], mean auxiliary loss []."""
        c = self.config
        vocabulary = Vocabulary(c)
        x = vocabulary(tokens)
        losses: list[jax.Array] = []
        for layer in range(c.num_layers):
            x, auxiliary = Block(c, mixture=layer % 2 == 1, name=f"layer_{layer:02}")(x)
            losses += auxiliary
        return vocabulary.logits(x), sum(losses, jnp.zeros(())) / len(losses)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits, auxiliary = self(tokens)
        return cross_entropy(logits, targets) + self.config.auxiliary_weight * auxiliary
