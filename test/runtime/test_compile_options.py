"""XLA's options by platform: one place for runs, for caches and for compiling ahead of time."""

from __future__ import annotations

import pytest

from alpa.runtime.compile_options import PLATFORMS, compile_options


def test_options_of_a_platform_and_of_the_user() -> None:
    assert compile_options("cpu") == {}
    assert compile_options("cpu", {"xla_a": 1}) == {"xla_a": 1}
    assert compile_options("gpu") == PLATFORMS["gpu"]
    scheduler = {"xla_gpu_enable_latency_hiding_scheduler": True}
    found = compile_options("gpu", {**scheduler, "xla_b": "c"})
    assert found == {**PLATFORMS["gpu"], **scheduler, "xla_b": "c"}


def test_processes_that_would_wait_for_one_another_are_refused() -> None:
    option = "xla_gpu_shard_autotuning"
    assert compile_options("gpu", {option: False})[option] is False
    with pytest.raises(ValueError, match=f"{option}=True, but only one process of a mesh compiles"):
        compile_options("gpu", {option: True})
