"""The cluster, settings and workers that the steps of a function are planned for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from alpa.passes.cost.cluster import parse_cluster
from alpa.runtime.interrupts import imported
from alpa.runtime.pjrt import CompilerOptions, Device, all_devices, lowering_platform
from alpa.runtime.planning import Capabilities, Settings
from alpa.runtime.sharing import Family
from alpa.runtime.step import LossReduction, MicroBatches
from alpa.runtime.workers.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class Target:
    """The cluster, settings and workers of a step."""

    named: Settings
    """as the user named them"""
    elastic: bool
    """whether `alpa.resume` plans for the hosts of the named cluster that live"""
    num_micro_batches: int | Literal["auto"]
    micro_batches: MicroBatches
    explain_roles: bool
    max_plans: int
    loss_reduction: LossReduction
    executor: Literal["local", "ray"]
    workers: WorkerOptions | None
    devices: tuple[Device, ...] | None
    check_finite: bool
    compiler_options: CompilerOptions | None
    executables: tuple[Path, ...]
    saved: str | Path | None
    family: Family
    """of all functions that use each other's state"""
    leads: bool = True
    """whether other functions of the family are planned for its meshes, not it for theirs"""

    @property
    def settings(self) -> Settings:
        """What is planned for, with the hosts of the cluster that live."""
        return replace(self.named, cluster=self.family.cluster)

    @property
    def _needed(self) -> int:
        """How many devices the cluster has."""
        return parse_cluster(self.settings.cluster).num_devices

    def join(self) -> None:
        """Joins the Ray cluster of the workers, if there are any.

        Tracing starts JAX, which must keep off the workers' devices in this process.
        """
        if self.executor == "ray":
            self.lowering_platform()

    def lowering_platform(self) -> str:
        """The devices' platform in JAX's lowering; with Ray, joins its cluster."""
        if self.executor == "local":
            return lowering_platform((self.devices or all_devices())[0])
        return ray_cluster().lowering_platform(self._needed, self.workers or WorkerOptions())

    def capabilities(self) -> Capabilities:
        """What the executor can run; with Ray, joins its cluster."""
        if self.executor == "local":
            return Capabilities()
        return ray_cluster().capabilities(self._needed, self.workers or WorkerOptions())

    def check_devices(self) -> None:
        """Raises ValueError if the cluster has more devices than this process."""
        if self.executor != "local" or self.saved is not None:
            return
        devices, needed = self.devices or all_devices(), self._needed
        if needed <= len(devices):
            return
        platform = devices[0].platform.upper()
        text = (
            f"the cluster {self.settings.cluster} has {needed} devices, and JAX sees "
            f"{len(devices)} of {platform}; planning needs none of them (call .plan), but running "
            "does: "
        )
        if platform == "CPU":
            raise ValueError(
                f"{text}name a cpu cluster of {len(devices)}, or make virtual devices before JAX "
                f'starts: jax.config.update("jax_num_cpu_devices", {needed})'
            )
        raise ValueError(f"{text}name a smaller cluster, or use the hosts of Ray: executor='ray'")


def ray_cluster() -> Any:
    """The module about Ray's nodes; it takes seconds to import, and local steps do not need it."""
    return imported("alpa.runtime.workers.cluster")
