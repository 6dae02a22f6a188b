"""Keeps the calling process off the accelerators that its workers need."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from alpa.runtime.pjrt import Device, all_devices, has_started
from alpa.runtime.workers.options import Platform, WorkerOptions

_log = logging.getLogger(__name__)


def keep_caller_off(platform: Platform, options: WorkerOptions) -> None:
    """Keeps this process to the CPU if its workers have accelerators.

    Raises:
        ValueError: JAX has started on accelerators here.
    """
    if platform == "cpu" or not options.keep_caller_off_gpus:
        return
    if has_started():
        check_caller(all_devices())
    elif jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        _log.info(
            "this process keeps to the CPU, because JAX would take most of each %s here that the "
            "workers need; WorkerOptions(keep_caller_off_gpus=False) leaves the choice to JAX",
            platform.upper(),
        )
        jax.config.update("jax_platforms", "cpu")


def check_caller(devices: Sequence[Device]) -> None:
    """Raises ValueError if these devices of the calling process are accelerators."""
    kind = devices[0].platform
    if kind == "cpu":
        return
    raise ValueError(
        f"JAX has started in this process on {len(devices)} {kind.upper()}(s) "
        f"({devices[0].device_kind}) and holds their memory, which the workers need; begin the "
        'program with jax.config.update("jax_platforms", "cpu"), or, if the workers have other '
        "devices or enough memory is left, pass WorkerOptions(keep_caller_off_gpus=False)"
    )
