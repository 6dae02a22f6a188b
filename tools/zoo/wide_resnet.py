"""Wide-ResNet: a bottleneck ResNet whose 3x3 convolutions are wider by a factor.

Sizes: Alpa (OSDI'22), table 8: images of 224x224x3, 1024 classes, f32. The factor widens the output
of the 3x3 convolutions, as in Alpa's benchmark. Batch norm uses the statistics of the micro-batch
and keeps running averages, which the forward pass writes.
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

RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)


@dataclass(frozen=True, kw_only=True)
class WideResNetConfig:
    stage_sizes: tuple[int, ...]
    base_channels: int
    width_factor: int
    image_size: int = 224
    num_classes: int = 1024
    dtype: Any = jnp.float32
    global_batch_size: int = 1536

    def model(self) -> nn.Module:
        return WideResNet(self)

    def inputs(self) -> Mapping[str, Input]:
        return {
            "images": Input(shape=(self.image_size, self.image_size, 3)),
            "labels": Input(dtype=np.int32, below=self.num_classes),
        }


_conv = partial(nn.Conv, use_bias=False)
_norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


class Bottleneck(nn.Module):
    """[batch, height, width, channels] -> [batch, height / stride, width / stride, 4 channels]"""

    channels: int
    width_factor: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = partial(_conv, dtype=self.dtype), partial(_norm, dtype=self.dtype)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels * self.width_factor, (3, 3), strides)(y)))
        y = norm()(conv(self.channels * 4, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_shortcut")(
                conv(self.channels * 4, (1, 1), strides, name="conv_shortcut")(x)
            )
        return nn.relu(x + y)


class WideResNet(nn.Module):
    config: WideResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits: [batch, size, size, 3] -> [batch, classes]."""
        c = self.config
        x = _conv(c.base_channels, (7, 7), (2, 2), dtype=c.dtype)(images)
        x = nn.relu(_norm(name="norm_stem", dtype=c.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, num_blocks in enumerate(c.stage_sizes):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(
                    c.base_channels * 2**stage,
                    c.width_factor,
                    stride,
                    c.dtype,
                    name=f"stage_{stage}_block_{block:02}",
                )(x)
        return nn.Dense(c.num_classes, dtype=c.dtype)(jnp.mean(x, axis=(1, 2)))

    def loss(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(self(images), labels)
