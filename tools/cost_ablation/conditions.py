"""What else the machine did while strategies were timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The machine's cores, the load right before a program was timed, and the version of JAX."""

    cores: int
    load: float
    """mean number of running processes of the last minute"""
    jax: str

    @classmethod
    def now(cls) -> Conditions:
        return cls(
            cores=os.cpu_count() or 1, load=round(os.getloadavg()[0], 2), jax=jax.__version__
        )


def text(programs: Sequence[Conditions]) -> str:
    """One line for all programs."""
    loads = [one.load for one in programs]
    cores = ", ".join(str(cores) for cores in sorted({one.cores for one in programs}))
    versions = ", ".join(sorted({one.jax for one in programs}))
    return (
        f"{len(programs)} programs on {cores} cores, jax {versions}; the load before each was "
        f"{min(loads):.1f} to {max(loads):.1f}"
    )
