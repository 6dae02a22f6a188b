"""Batches are placed ahead of their steps, and steps leave them unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import alpa.runtime
from alpa.runtime import Executable, WorkerOptions, prefetch


def check(step: Executable, moves: str) -> None:
    """Three steps of the program of `moves`; argument 3 is a batch, 0 and 1 are states."""
    generator = np.random.default_rng(0)
    c, p, k = (generator.normal(size=4).astype(np.float32) for _ in range(3))
    xs = [generator.normal(size=12).astype(np.float32) for _ in range(3)]
    reference = alpa.runtime.load(moves)
    state, expected = [c, p], [c, p]
    taken: list[int] = []

    def batches() -> Iterator[dict[int, np.ndarray]]:
        for number, x in enumerate(xs):
            taken.append(number)
            yield {3: x}

    for number, batch in enumerate(prefetch(step, batches(), ahead=1)):
        assert len(taken) == min(3, number + 2)
        assert (batch[3].shape, batch[3].dtype) == ((12,), np.float32)
        step(*state, k, batch[3])  # the batch is there for another step
        results = step(*state, k, batch[3])
        wanted = reference(*expected, k, xs[number])
        for result, it in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, it)
        state, expected = list(results[:2]), list(wanted[:2])
    with pytest.raises(ValueError, match=r"argument 2 .* placed as argument 3"):
        step(*state, batch[3], xs[0])
    with pytest.raises(ValueError, match=r"argument 3 is float32\[4\]; expected float32\[12\]"):
        step.place(3, xs[0][:4])
    with pytest.raises(ValueError, match="no argument 4"):
        step.place(4, xs[0])


def test_on_local_meshes(moves: str) -> None:
    check(alpa.runtime.load(moves), moves)


@pytest.mark.usefixtures("ray_cluster")
def test_on_ray(moves: str) -> None:
    workers = WorkerOptions(cache_directory=None, timeout_seconds=60)
    with alpa.runtime.load(moves, executor="ray", workers=workers) as step:
        check(step, moves)
        assert sum(step.held_bytes().values()) == 0  # states and batches are collected


def test_what_a_step_overwrites_is_not_placed(moves: str) -> None:
    donating = moves.replace(
        "alpa.input = 1 : i64,", "alpa.input = 1 : i64, jax.buffer_donor = true,"
    )
    step = alpa.runtime.load(donating)
    with pytest.raises(ValueError, match="argument 1 is donated to each step and cannot be placed"):
        step.place(1, np.zeros(4, np.float32))


def test_a_negative_number_ahead(moves: str) -> None:
    with pytest.raises(ValueError, match="ahead is -1; expected a whole number of at least 0"):
        next(prefetch(alpa.runtime.load(moves), [], ahead=-1))
