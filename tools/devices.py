"""Virtual CPU devices for the tools that run plans in their own process."""

from __future__ import annotations

import jax


class DevicesError(ValueError):
    """jax has made its devices already, and they are too few."""


def make_devices(number: int) -> None:
    """Asks jax for so many CPU devices, which it makes at its first use.

    Raises:
        DevicesError: it has been used, and has fewer.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        if len(jax.devices()) < number:
            raise DevicesError(
                f"the cluster has {number} devices, jax has made {len(jax.devices())} already; "
                "start the command in a process of its own"
            ) from error
