"""Virtual CPU devices for tools that run plans in their own process."""

from __future__ import annotations

import jax


class DevicesError(ValueError):
    """JAX has already created its devices, and there are too few."""


def make_devices(number: int) -> None:
    """Requests CPU devices from JAX, which creates them at its first use.

    Raises:
        DevicesError: JAX has been used already and has fewer devices.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        if len(jax.devices()) < number:
            raise DevicesError(
                f"the cluster has {number} devices, jax has made {len(jax.devices())} already; "
                "run the command in a process of its own"
            ) from error


def stay_on_cpu() -> None:
    """Keeps JAX from starting a GPU, whose memory this process would take, before it uses one."""
    jax.config.update("jax_platforms", "cpu")
