"""The devices that stages are compiled for without having one.

XLA's GPU compiler needs a few facts about the device. The figures are those of XLA's own target
descriptions (openxla/xla, `xla/backends/gpu/target_config/specs`), except where a comment says
otherwise. `memory` is the number of bytes that the driver reports, not the number on the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa.passes.cost.presets import COMPUTE_CAPABILITY, DRIVER_MEMORY

_SHARED_PER_BLOCK = 48 * 1024
_REGISTERS = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: bytes, bytes/s and GHz."""

    name: str
    """as its driver reports it"""
    compute_capability: tuple[int, int]
    cores: int
    """streaming multiprocessors"""
    f32_units_per_core: int
    clock: float
    memory: int
    memory_bandwidth: int
    l2_cache: int
    shared_per_core: int
    shared_per_block: int
    """for a kernel that asks for more than the usual 48 KiB"""

    def description(self) -> str:
        """The device as XLA's `GpuTargetConfigProto`, in text."""
        major, minor = self.compute_capability
        fields: dict[str, float] = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "registers_per_core_limit": _REGISTERS,
            "registers_per_block_limit": _REGISTERS,
            "shared_memory_per_block": _SHARED_PER_BLOCK,
            "shared_memory_per_block_optin": self.shared_per_block,
            "shared_memory_per_core": self.shared_per_core,
            "core_count": self.cores,
            "fpus_per_core": self.f32_units_per_core,
            "clock_rate_ghz": self.clock,
            "l2_cache_size": self.l2_cache,
            "memory_bandwidth": self.memory_bandwidth,
            "device_memory_size": self.memory,
        }
        info = " ".join(f"{name}: {value}" for name, value in fields.items())
        return (
            f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }}"
            f' }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}'
            f' device_description_str: "{self.name}"'
        )


def _volta(device: str, name: str) -> Gpu:
    return Gpu(
        name=name,
        compute_capability=COMPUTE_CAPABILITY[device],
        cores=80,
        f32_units_per_core=64,
        clock=1.53,
        memory=DRIVER_MEMORY[device],
        memory_bandwidth=898_048_000_000,
        l2_cache=6 * 2**20,
        shared_per_core=96 * 1024,
        shared_per_block=96 * 1024,
    )


def _ampere(device: str, name: str, memory_bandwidth: int) -> Gpu:
    return Gpu(
        name=name,
        compute_capability=COMPUTE_CAPABILITY[device],
        cores=108,
        f32_units_per_core=64,
        clock=1.41,
        memory=DRIVER_MEMORY[device],
        memory_bandwidth=memory_bandwidth,
        l2_cache=40 * 2**20,
        shared_per_core=164 * 1024,
        shared_per_block=163 * 1024,
    )


def _hopper(device: str, name: str, memory_bandwidth: int) -> Gpu:
    return Gpu(
        name=name,
        compute_capability=COMPUTE_CAPABILITY[device],
        cores=132,
        f32_units_per_core=128,
        clock=1.98,
        memory=DRIVER_MEMORY[device],
        memory_bandwidth=memory_bandwidth,
        l2_cache=50 * 2**20,
        shared_per_core=228 * 1024,
        shared_per_block=227 * 1024,
    )


TARGETS: Mapping[str, Gpu] = {
    "V100-SXM2-16GB": _volta("V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
    "V100-SXM2-32GB": _volta("V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
    "A100-SXM4-40GB": _ampere("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", 1_555_200_000_000),
    "A100-SXM4-80GB": _ampere("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", 2_039_040_000_000),
    "H100-SXM5-80GB": _hopper("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", 3_352_320_000_000),
    "H200-SXM5-141GB": _hopper("H200-SXM5-141GB", "NVIDIA H200", 4_800_000_000_000),
    "B200-SXM": Gpu(
        name="NVIDIA B200",
        compute_capability=COMPUTE_CAPABILITY["B200-SXM"],
        cores=148,
        f32_units_per_core=128,
        clock=1.965,
        memory=DRIVER_MEMORY["B200-SXM"],
        memory_bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
        shared_per_core=228 * 1024,
        shared_per_block=227 * 1024,
    ),
}
"""By the name of the device in a preset, or in a cluster file (`Device.name`)."""
