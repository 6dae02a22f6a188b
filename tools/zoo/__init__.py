"""The model zoo: training programs for benchmarks, examples and tests, lowered by shapes alone.

    from alpa.tools import zoo

    program = zoo.get("gpt-2.6b")
    text = program.lower(micro_batch_size=8)

The sizes are those of the models' papers; see each family's file. The tiny programs run on a CPU.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import jax.numpy as jnp
import optax

from alpa.tools.zoo.gpt import GPTConfig
from alpa.tools.zoo.llama import LlamaConfig
from alpa.tools.zoo.moe import MoEConfig
from alpa.tools.zoo.program import Input, TrainingProgram, TrainState
from alpa.tools.zoo.t5 import T5Config
from alpa.tools.zoo.unet import UNetConfig
from alpa.tools.zoo.wide_resnet import RESNET_50, RESNET_101, WideResNetConfig

__all__ = ["OPTIMIZERS", "Input", "TrainState", "TrainingProgram", "get", "names"]

OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3),
    "sgd": lambda: optax.sgd(1e-1, momentum=0.9),
    "adamw-clip": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01)
    ),
}


def _gpt(hidden_size: int, num_layers: int, num_heads: int) -> GPTConfig:
    return GPTConfig(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)


def _moe(hidden_size: int, num_layers: int, num_heads: int, num_experts: int) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_experts=num_experts,
    )


def _wresnet(stages: tuple[int, ...], channels: int, width_factor: int) -> WideResNetConfig:
    return WideResNetConfig(stage_sizes=stages, base_channels=channels, width_factor=width_factor)


def _t5(
    hidden_size: int, mlp_size: int, num_layers: int, num_heads: int, head_size: int = 64
) -> T5Config:
    return T5Config(
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_size=head_size,
    )


def _llama(hidden_size: int, mlp_size: int, num_layers: int, num_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
    )


def _unet_256(channels: int) -> UNetConfig:
    """For images of 256x256."""
    return UNetConfig(
        image_size=256,
        channels=channels,
        multipliers=(1, 1, 2, 2, 4, 4),
        global_batch_size=64,
    )


GPT_TINY = GPTConfig(
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    vocab_size=256,
    sequence_length=32,
    dtype=jnp.float32,
    global_batch_size=16,
)

CONFIGS = {
    "gpt-350m": _gpt(1024, 24, 16),
    "gpt-1.3b": _gpt(2048, 24, 32),
    "gpt-2.6b": _gpt(2560, 32, 32),
    "gpt-6.7b": _gpt(4096, 32, 32),
    "gpt-15b": _gpt(5120, 48, 32),
    "gpt-39b": _gpt(8192, 48, 64),
    "moe-380m": _moe(768, 8, 16, 8),
    "moe-1.3b": _moe(768, 16, 16, 16),
    "moe-2.4b": _moe(1024, 16, 16, 16),
    "moe-10b": _moe(1536, 16, 16, 32),
    "moe-27b": _moe(2048, 16, 32, 48),
    "moe-70b": _moe(2048, 32, 32, 64),
    "wresnet-250m": _wresnet(RESNET_50, 160, 2),
    "wresnet-1b": _wresnet(RESNET_50, 320, 2),
    "wresnet-2b": _wresnet(RESNET_50, 448, 2),
    "wresnet-4b": _wresnet(RESNET_50, 640, 2),
    "wresnet-6.8b": _wresnet(RESNET_50, 320, 16),
    "wresnet-13b": _wresnet(RESNET_101, 320, 16),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, 128),
    "t5-11b": _t5(1024, 65536, 24, 128, 128),
    "unet-36m": UNetConfig(image_size=32, channels=128, multipliers=(1, 2, 2, 2)),
    "unet-114m": _unet_256(128),
    "unet-256m": _unet_256(192),
    "llama-8b": _llama(4096, 14336, 32, 32),
    "llama-70b": _llama(8192, 28672, 80, 64),
    "gpt-tiny": GPT_TINY,
    "gpt-tiny-dropout": dataclasses.replace(GPT_TINY, dropout=0.1),
    "moe-tiny": MoEConfig(
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_experts=4,
        vocab_size=256,
        sequence_length=32,
        mlp_factor=4,
        dtype=jnp.float32,
        global_batch_size=16,
    ),
    "wresnet-tiny": WideResNetConfig(
        stage_sizes=(2, 2),
        base_channels=8,
        width_factor=2,
        image_size=32,
        num_classes=16,
        global_batch_size=16,
    ),
    "t5-tiny": T5Config(
        hidden_size=64,
        mlp_size=128,
        num_layers=2,
        num_heads=4,
        head_size=16,
        vocab_size=256,
        source_length=32,
        target_length=16,
        num_buckets=8,
        max_distance=16,
        dtype=jnp.float32,
        global_batch_size=16,
    ),
    "llama-tiny": LlamaConfig(
        hidden_size=64,
        mlp_size=192,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=256,
        sequence_length=32,
        dtype=jnp.float32,
        global_batch_size=16,
    ),
    "unet-tiny": UNetConfig(
        image_size=16,
        channels=16,
        multipliers=(1, 2),
        blocks_per_level=1,
        attention_size=8,
        num_groups=4,
        global_batch_size=16,
    ),
}


def names() -> list[str]:
    return list(CONFIGS)


def get(name: str, *, optimizer: str = "adam", **overrides: Any) -> TrainingProgram:
    """Returns the program of that name; `overrides` replace fields of its configuration.

    `zoo.get("gpt-2.6b", num_layers=4, tied=False)` is a GPT-2.6B with four layers and a separate
    output projection.
    """
    _check("program", name, CONFIGS)
    _check("optimizer", optimizer, OPTIMIZERS)
    config = CONFIGS[name]
    for field in overrides:
        _check(f"field of {name}", field, [f.name for f in dataclasses.fields(config)])
    return TrainingProgram(
        name=name,
        config=dataclasses.replace(config, **overrides),
        optimizer=OPTIMIZERS[optimizer](),
    )


def _check(kind: str, name: str, known: Any) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known) or sorted(known)
    raise ValueError(f"no {kind} is called {name!r}; try {', '.join(near)}")
