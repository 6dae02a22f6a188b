"""What the thesis publishes of TeraPipe: its settings (table 2.1) and tables 2.2 to 2.4.

Zhuohan Li's thesis, chapter 2: TeraPipe, token-level pipeline parallelism. Every run is on
p3.16xlarge hosts of 8 V100s, 10 steps, in f16.
"""

from __future__ import annotations

from dataclasses import dataclass

USUAL_TOKENS = 2048
"""of a sequence, wherever table 2.4 says nothing else"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of table 2.1."""

    name: str
    layers: int
    hidden: int
    gpus: int
    batch: int
    """sequences per step, of all data-parallel replicas"""
    replicas: int
    """#Data"""
    stages: int
    """#Pipe, the thesis' K"""

    @property
    def samples(self) -> int:
        """Sequences of a replica, which go through one pipeline."""
        return self.batch // self.replicas


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row of table 2.2, 2.3 or 2.4. Every batch slice is one sequence, cut in the same way."""

    setting: int
    """its number in table 2.1"""
    slices: tuple[int, ...]
    """tokens of each slice of a sequence"""
    seconds: float
    """of a step, mean"""
    deviation: float
    """of it, standard, in seconds"""
    teraflops: float
    """TFLOP/s per GPU, as published"""
    batch: int | None = None
    """sequences per step, where it is not the setting's"""

    @property
    def tokens(self) -> int:
        """of a sequence"""
        return sum(self.slices)

    @property
    def is_uniform(self) -> bool:
        """Whether all slices have the same length."""
        return len(set(self.slices)) == 1


def _setting(
    name: str, layers: int, hidden: int, gpus: int, batch: int, replicas: int, stages: int
) -> Setting:
    return Setting(
        name=name,
        layers=layers,
        hidden=hidden,
        gpus=gpus,
        batch=batch,
        replicas=replicas,
        stages=stages,
    )


SETTINGS = {
    1: _setting("GPT3-1B", 24, 2048, 192, 128, 8, 24),
    2: _setting("GPT3-1B", 24, 2048, 192, 72, 2, 12),
    3: _setting("GPT3-1B", 24, 2048, 192, 72, 1, 24),
    4: _setting("GPT3-13B", 40, 5120, 320, 32, 2, 20),
    5: _setting("GPT3-13B", 40, 5120, 320, 32, 1, 40),
    6: _setting("GPT3-44B", 96, 6144, 384, 8, 4, 96),
    7: _setting("GPT3-44B", 96, 6144, 384, 8, 2, 24),
    8: _setting("GPT3-44B", 96, 6144, 384, 8, 1, 48),
    9: _setting("GPT3-175B", 96, 12288, 384, 2, 1, 96),
    10: _setting("GPT3-175B", 96, 12288, 384, 2, 1, 48),
}


def _row(
    setting: int,
    slices: tuple[int, ...],
    seconds: float,
    deviation: float,
    teraflops: float,
    batch: int | None = None,
) -> Measured:
    return Measured(
        setting=setting,
        slices=slices,
        seconds=seconds,
        deviation=deviation,
        teraflops=teraflops,
        batch=batch,
    )


_WHOLE = (USUAL_TOKENS,)
_DP_44B = (384, 384, 368, 320, 296, 296)
_DP_175B = (120,) * 4 + (112,) * 6 + (104,) * 8 + (64,)

TABLES = {
    "2.2": (
        _row(1, _WHOLE, 1.517, 0.107, 0.8841),
        _row(1, (776, 640, 632), 1.254, 0.160, 1.0695),
        _row(2, _WHOLE, 1.018, 0.065, 2.9643),
        _row(3, _WHOLE, 0.913, 0.027, 6.6105),
        _row(4, _WHOLE, 2.637, 0.055, 3.0305),
        _row(4, (1024,) * 2, 1.891, 0.084, 4.2261),
        _row(5, _WHOLE, 1.863, 0.007, 8.5792),
        _row(5, (704, 688, 656), 1.328, 0.037, 12.0354),
        _row(6, _WHOLE, 13.319, 0.067, 0.2148),
        _row(6, (64,) * 26 + (56,) * 6 + (48,), 7.103, 0.243, 0.4028),
        _row(7, _WHOLE, 4.311, 0.032, 1.3274),
        _row(7, (368, 384, 384, 368, 256, 288), 2.771, 0.112, 2.0652),
        _row(8, _WHOLE, 2.662, 0.001, 4.2995),
        _row(8, _DP_44B, 1.111, 0.002, 10.3018),
        _row(9, _WHOLE, 9.990, 0.005, 1.1300),
        _row(9, _DP_175B, 1.481, 0.002, 7.6225),
        _row(10, _WHOLE, 5.822, 0.003, 1.9390),
        _row(10, (128,) * 16, 1.160, 0.001, 9.7318),
    ),
    "2.3": (
        _row(8, _WHOLE, 2.662, 0.001, 4.2995),
        _row(8, (512,) * 4, 1.241, 0.003, 9.2226),
        _row(8, (256,) * 8, 1.255, 0.004, 9.1197),
        _row(8, (128,) * 16, 1.241, 0.003, 9.2226),
        _row(8, _DP_44B, 1.111, 0.002, 10.3018),
        _row(9, _WHOLE, 9.990, 0.005, 1.1300),
        _row(9, (512,) * 4, 2.902, 0.003, 3.8900),
        _row(9, (256,) * 8, 1.892, 0.002, 5.9667),
        _row(9, (128,) * 16, 1.547, 0.01, 7.2973),
        _row(9, (64,) * 32, 1.593, 0.002, 7.0866),
        _row(9, (32,) * 64, 2.227, 0.002, 5.0691),
        _row(9, (16,) * 128, 3.252, 0.004, 3.4714),
        _row(9, _DP_175B, 1.481, 0.002, 7.6225),
    ),
    "2.4": (
        _row(5, _WHOLE, 1.863, 0.007, 8.5792),
        _row(5, (704, 688, 656), 1.328, 0.037, 12.0354),
        _row(5, (4096,), 2.526, 0.001, 1.5819, 8),
        _row(5, (552, 536, 528, 512, 504, 496, 488, 480), 0.913, 0.085, 4.3765, 8),
        _row(5, (6144,), 3.754, 0.006, 0.5322, 4),
        _row(5, (584, 568) + (512,) * 6 + (496, 488, 472, 464), 0.756, 0.008, 2.6427, 4),
        _row(5, (8192,), 4.978, 0.004, 0.2007, 2),
        _row(5, (512,) * 6 + (480,) * 2 + (416,) * 10, 0.636, 0.001, 1.5707, 2),
    ),
}
