"""Segments of shared memory."""

from __future__ import annotations

import os
import random
import resource

import numpy as np
import pytest

from alpa.runtime.workers.transport.base import TransportError
from alpa.runtime.workers.transport.segments import Pool, Segment


def take(pool: Pool, size: int) -> tuple[int, Segment]:
    number, segment, file, _ = pool.take(size)
    if file is not None:
        os.close(file)
    return number, segment


def test_a_segment_is_used_again_once_its_message_is_gone() -> None:
    pool = Pool()
    number, segment = take(pool, 1000)
    segment.use()[:1000] = 7
    message = segment.message()
    part = message[10:20].view(np.uint16)
    del message
    other, _ = take(pool, 1000)
    assert other != number
    assert (part == 0x0707).all()
    del part
    assert segment.is_free
    assert take(pool, 1000)[0] == number


def test_a_small_message_does_not_take_a_large_segment() -> None:
    pool = Pool()
    number, _ = take(pool, 1 << 20)
    assert take(pool, 100)[0] != number
    assert take(pool, 600_000)[0] == number


def test_both_processes_see_the_same_bytes() -> None:
    """Two mappings of one descriptor, as in two processes."""
    _, segment, file, _ = Pool().take(1000)
    assert file is not None
    other = Segment(file, segment.size)
    os.close(file)
    segment.use()[:4] = [1, 2, 3, 4]
    assert not other.is_free
    message = other.message()
    assert list(message[:4]) == [1, 2, 3, 4]
    del message
    assert segment.is_free


def test_memory_is_bounded_by_what_was_in_use() -> None:
    """Sizes change all the time, and at most three messages are in use."""
    generator, pool = random.Random(0), Pool()
    segments, held = dict[int, int](), list[np.ndarray]()
    peak = 0
    for _ in range(500):
        size = generator.choice([100, 5000, 40_000, 300_000, 1_000_000, 2_500_000])
        number, segment, file, given_up = pool.take(generator.randint(size, 2 * size))
        if file is not None:
            os.close(file)
        segment.use()
        held = [*held[-2:], segment.message()]
        for it in given_up:
            del segments[it]
        segments[number] = segment.size
        peak = max(peak, sum(-(-(it.size + 64) // 4096) * 4096 for it in held))
        assert sum(segments.values()) <= 4 * peak


def test_memory_that_cannot_be_had() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        message = "1,003,520 bytes of memory for tiles cannot be had: .*too large; take fewer"
        with pytest.raises(TransportError, match=message):
            Pool().take(1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
