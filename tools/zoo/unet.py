"""U-Net: a denoising diffusion model, levels of halved size with skip connections between them.

Sizes: Ho et al. 2020 (DDPM), section 4 and appendix B: 35.7M parameters at 32x32 (CIFAR10), 114M
and 256M at 256x256 (LSUN), two residual blocks per level, attention where images are 16x16, f32.
The step is theirs, the mean squared error of the predicted noise, with the cosine schedule of
Nichol & Dhariwal 2021. Noise and time come with the batch: the step draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from alpa.tools.zoo.program import Input

NUM_TIMES = 1000


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    image_size: int
    channels: int
    multipliers: tuple[int, ...]
    blocks_per_level: int = 2
    attention_size: int = 16
    num_groups: int = 32
    image_channels: int = 3
    global_batch_size: int = 128

    def model(self) -> nn.Module:
        return UNet(self)

    def inputs(self) -> Mapping[str, Input]:
        image = Input(shape=(self.image_size, self.image_size, self.image_channels))
        return {
            "images": image,
            "noise": image,
            "times": Input(dtype=np.int32, below=NUM_TIMES),
        }


def signal_level(times: jax.Array) -> jax.Array:
    """The variance of the image that is left after each time, between 1 and 0 (cosine schedule)."""
    return jnp.cos((times / NUM_TIMES + 0.008) / 1.008 * jnp.pi / 2) ** 2


def time_encoding(times: jax.Array, size: int) -> jax.Array:
    """Sines and cosines of `size / 2` frequencies: [batch] -> [batch, size]."""
    frequencies = jnp.exp(-np.log(10000) * jnp.arange(size // 2) / (size // 2 - 1))
    angles = times[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResidualBlock(nn.Module):
    """[batch, size, size, any channels] and a time [batch, features] -> [..., channels]."""

    channels: int
    num_groups: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, self.channels, (3, 3))
        norm = partial(nn.GroupNorm, self.num_groups)
        y = conv()(nn.silu(norm()(x)))
        y += nn.Dense(self.channels)(nn.silu(time))[:, None, None, :]
        y = conv()(nn.silu(norm()(y)))
        if x.shape[-1] != self.channels:
            x = nn.Dense(self.channels, name="shortcut")(x)
        return x + y


class SpatialAttention(nn.Module):
    """Attention with one head over all positions: [batch, size, size, channels] -> the same."""

    num_groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, channels = x.shape
        y = nn.GroupNorm(self.num_groups)(x).reshape(batch, height * width, channels)
        query, value = (nn.Dense(channels, name=n)(y) for n in ("query", "value"))
        # Softmax ignores a bias of the keys, whose gradient would be rounding noise.
        key = nn.Dense(channels, name="key", use_bias=False)(y)
        scores = jnp.einsum("bqc,bkc->bqk", query * channels**-0.5, key)
        mixed = jnp.einsum("bqk,bkc->bqc", nn.softmax(scores), value)
        return x + nn.Dense(channels, name="out")(mixed).reshape(x.shape)


class UNet(nn.Module):
    config: UNetConfig

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        """The noise in the images: [batch, size, size, channels], [batch] -> as the images."""
        c = self.config
        time = nn.Dense(4 * c.channels)(time_encoding(times, c.channels))
        time = nn.Dense(4 * c.channels)(nn.silu(time))

        def block(x: jax.Array, level: int) -> jax.Array:
            x = ResidualBlock(c.channels * c.multipliers[level], c.num_groups)(x, time)
            return SpatialAttention(c.num_groups)(x) if x.shape[1] == c.attention_size else x

        last = len(c.multipliers) - 1
        x = nn.Conv(c.channels, (3, 3))(images)
        skips = [x]
        for level in range(last + 1):
            for _ in range(c.blocks_per_level):
                x = block(x, level)
                skips.append(x)
            if level < last:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2))(x)
                skips.append(x)

        x = ResidualBlock(x.shape[-1], c.num_groups)(x, time)
        x = SpatialAttention(c.num_groups)(x)
        x = ResidualBlock(x.shape[-1], c.num_groups)(x, time)

        for level in reversed(range(last + 1)):
            for _ in range(c.blocks_per_level + 1):
                x = block(jnp.concatenate([x, skips.pop()], axis=-1), level)
            if level > 0:
                x = nn.Conv(x.shape[-1], (3, 3))(_upsample(x))
        return nn.Conv(c.image_channels, (3, 3))(nn.silu(nn.GroupNorm(c.num_groups)(x)))

    def loss(self, images: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        level = signal_level(times)[:, None, None, None]
        noisy = jnp.sqrt(level) * images + jnp.sqrt(1 - level) * noise
        return jnp.mean((self(noisy, times) - noise) ** 2)


def _upsample(x: jax.Array) -> jax.Array:
    """Every pixel twice in both directions: [batch, h, w, c] -> [batch, 2h, 2w, c]."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)
