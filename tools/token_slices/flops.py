"""The column of TFLOP/s per GPU: as the thesis defines it, and of all the work that a step does.

The thesis does not write its definition down. All rows of its three tables agree to within 0.11 %
with

    72 N H^2 (1 + L / 12 H) L B / #Data / #GPUs / seconds,    L = 2048

for N layers of hidden size H and B sequences per step: matrix products of forward and backward,
causal attention counted half, no vocabulary, nothing computed again. #GPUs counts the GPUs of all
data-parallel replicas, but B / #Data the sequences of one. L is 2048 also where table 2.4 has
longer sequences.
"""

from __future__ import annotations

from alpa.tools.token_slices.published import SETTINGS, USUAL_TOKENS, Measured


def thesis_teraflops(row: Measured) -> float:
    """TFLOP/s per GPU as the thesis defines them."""
    return _teraflops(row, USUAL_TOKENS) / SETTINGS[row.setting].replicas


def teraflops(row: Measured) -> float:
    """TFLOP/s per GPU of the batches of all replicas, at the row's own length of sequences."""
    return _teraflops(row, row.tokens)


def _teraflops(row: Measured, tokens: int) -> float:
    setting = SETTINGS[row.setting]
    per_token = 72 * setting.layers * setting.hidden**2 * (1 + tokens / (12 * setting.hidden))
    batch = setting.batch if row.batch is None else row.batch
    return per_token * tokens * batch / setting.gpus / row.seconds / 1e12
