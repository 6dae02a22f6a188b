"""The programs whose plans are ranked: few layers, at the sizes of models for the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from alpa.tools import zoo
from alpa.tools.zoo import Input, TrainingProgram


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A multilayer perceptron that fits targets of its own width."""

    hidden_size: int
    num_layers: int
    mlp_factor: int = 4
    dtype: Any = jnp.float32
    global_batch_size: int = 1024

    def model(self) -> nn.Module:
        return MLP(self)

    def inputs(self) -> Mapping[str, Input]:
        return {name: Input(shape=(self.hidden_size,)) for name in ("x", "targets")}


class MLP(nn.Module):
    """[batch, hidden] -> the same: layers of two products with a ReLU between them."""

    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        for _ in range(c.num_layers):
            wide = nn.relu(nn.Dense(c.mlp_factor * c.hidden_size, dtype=c.dtype)(x))
            x = nn.Dense(c.hidden_size, dtype=c.dtype)(wide)
        return x

    def loss(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.square(self(x) - targets).mean().astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class RankedProgram:
    """A program, and the samples of one micro-batch."""

    name: str
    micro_batch_size: int
    num_micro_batches: int = 4
    model: str | MLPConfig
    """a zoo program's name, whose `fields` are replaced"""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def training(self) -> TrainingProgram:
        """The training step, with Adam."""
        if isinstance(self.model, MLPConfig):
            program = TrainingProgram(
                name=self.name, config=self.model, optimizer=zoo.OPTIMIZERS["adam"]()
            )
        else:
            program = zoo.get(self.model, **self.fields)
        return dataclasses.replace(program, name=self.name)

    @property
    def batch_size(self) -> int:
        """The samples of a step."""
        return self.micro_batch_size * self.num_micro_batches


def _mlp(name: str, batch: int, hidden_size: int, num_layers: int) -> RankedProgram:
    config = MLPConfig(hidden_size=hidden_size, num_layers=num_layers)
    return RankedProgram(name=name, model=config, micro_batch_size=batch)


def _of(name: str, model: str, batch: int, **fields: Any) -> RankedProgram:
    return RankedProgram(name=name, model=model, micro_batch_size=batch, fields=fields)


FOR_GPUS = (
    _of("gpt-1024", "gpt-350m", 32, num_layers=2, vocab_size=32000, sequence_length=512),
    _of("gpt-2048", "gpt-1.3b", 16, num_layers=2, vocab_size=51200),
    _of("gpt-4096", "gpt-6.7b", 8, num_layers=2, vocab_size=8192),
    _of("moe-1024", "moe-2.4b", 16, num_layers=2, num_experts=8, vocab_size=8192),
    _of("moe-2048", "moe-27b", 8, num_layers=2, num_experts=16),
    _of("wresnet-160", "wresnet-250m", 32, stage_sizes=(1, 1, 1, 1)),
    _of("wresnet-320", "wresnet-1b", 64, stage_sizes=(1, 1), image_size=112),
    _of("t5-768", "t5-base", 64, num_layers=1),
    _of("t5-1024", "t5-3b", 16, num_layers=1),
    _of("unet-128", "unet-36m", 128, multipliers=(1, 2), blocks_per_level=1),
    _of("llama-4096", "llama-8b", 8, num_layers=1, vocab_size=32000, sequence_length=2048),
    _mlp("mlp-8192", 512, 8192, 3),
)
"""Hidden sizes of real models, so that compute counts; few layers, so that XLA is fast."""
_TINY: Mapping[str, Any] = {"num_layers": 1, "sequence_length": 64}

FOR_CPU = (
    _of("gpt-128", "gpt-tiny", 16, hidden_size=128, **_TINY),
    _of("gpt-256", "gpt-tiny", 8, hidden_size=256, vocab_size=2048, **_TINY),
    _of("gpt-512", "gpt-tiny", 8, hidden_size=512, num_layers=1),
    _of("moe-128", "moe-tiny", 16, hidden_size=128, num_layers=2, num_experts=8),
    _of("moe-256", "moe-tiny", 8, hidden_size=256, num_layers=2),
    _of("wresnet-16", "wresnet-tiny", 16, base_channels=16),
    _of("wresnet-32", "wresnet-tiny", 8, base_channels=32, stage_sizes=(1, 1)),
    _of("t5-128", "t5-tiny", 16, hidden_size=128, mlp_size=512, num_layers=1),
    _of("t5-256", "t5-tiny", 8, hidden_size=256, mlp_size=1024, num_layers=1, source_length=64),
    _of("unet-32", "unet-tiny", 16, channels=32),
    _of("llama-256", "llama-tiny", 8, hidden_size=256, mlp_size=768, **_TINY),
    _mlp("mlp-512", 64, 512, 3),
)
"""The same families at sizes whose steps take milliseconds on CPU devices."""
