"""Figures of well-known machines, by the name that stands before the shape in ``h100:4x8``.

``IDEAL`` has the vendors' data sheets: dense peaks (no structured sparsity). From Ampere on,
``f32`` is the TF32 figure, because that is how XLA runs f32 matrix products at its default
precision. Intra-host bandwidth is NVLink's per device and direction, half of the total on the data
sheets. Latencies are round estimates of one step of a collective (NVLink 5 us, network 20 us).

``PRESETS`` has what programs reach. Each fraction and latency has its source beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from alpa.passes.cost.device import Collectives, Cost, Device, Efficiency, Link, Machine, Transfer

_GIB = 2**30
_GBIT = 1e9 / 8
"""bytes/s in one Gbit/s"""

# NVIDIA V100 data sheet, SXM2; six NVLinks of 25 GB/s per direction. Volta has no bf16 units:
# bf16 stands for f16 here, so that a plan for f16 can be read from a bf16 program.
# Network: AWS p3.16xlarge, 25 Gbit/s per host, the testbed of the Alpa paper (section 8).
_V100_PEAKS = {"f16": 125e12, "bf16": 125e12, "f32": 15.7e12, "f64": 7.8e12}
# NVIDIA A100 data sheet, SXM4: TF32 156, f16/bf16 312, f64 tensor cores 19.5, int8 624 T/s;
# NVLink 600 GB/s in total. Network: AWS p4d.24xlarge, 400 Gbit/s per host.
_A100_PEAKS = {"f16": 312e12, "bf16": 312e12, "f32": 156e12, "f64": 19.5e12, "i8": 624e12}
# NVIDIA H100 and H200 data sheets, SXM5 (sparse figures halved): TF32 495, f16/bf16 989,
# f8 and int8 1979, f64 tensor cores 67 T/s; NVLink 900 GB/s in total.
# Network: eight 400 Gbit/s adapters per host (DGX H100, AWS p5.48xlarge).
_HOPPER_PEAKS = {
    "f8": 1979e12,
    "f16": 989e12,
    "bf16": 989e12,
    "f32": 495e12,
    "f64": 67e12,
    "i8": 1979e12,
}
# NVIDIA HGX B200 data sheet, per device (sparse figures halved): f8 and int8 4.5, f16/bf16
# 2.25, TF32 1.12 PFLOP/s, f64 37 TFLOP/s; 180 GB, 7.7 TB/s; NVLink 1.8 TB/s in total.
# Network: eight 400 Gbit/s adapters per host (DGX B200).
_B200_PEAKS = {
    "f8": 4.5e15,
    "f16": 2.25e15,
    "bf16": 2.25e15,
    "f32": 1.12e15,
    "f64": 37e12,
    "i8": 4.5e15,
}
# One XLA virtual device on one core of a laptop, for tests and trials: about 50 GFLOP/s of f32
# and a share of the memory's bandwidth. Half types are computed in f32. Collectives inside a
# process are copies through memory; between processes jax.experimental.transfer gave 0.6 GB/s.
_CPU_PEAKS = {"f16": 50e9, "bf16": 50e9, "f32": 50e9, "f64": 25e9}


def _ideal(
    name: str,
    memory: float,
    memory_bandwidth: float,
    peaks: Mapping[str, float],
    intra_host: float,
    inter_host: float,
    latencies: tuple[float, float] = (5e-6, 20e-6),
) -> Machine:
    """A device with its links by their bandwidths; the latencies are of the two in turn."""
    device = Device(
        name=name, memory=int(memory), peak_flops=peaks, memory_bandwidth=memory_bandwidth
    )
    return Machine(
        device=device,
        intra_host=Link(bandwidth=intra_host, latency=latencies[0]),
        inter_host=Link(bandwidth=inter_host, latency=latencies[1]),
    )


IDEAL = {
    "v100-16gb": _ideal("V100-SXM2-16GB", 16 * _GIB, 900e9, _V100_PEAKS, 150e9, 25 * _GBIT),
    "v100-32gb": _ideal("V100-SXM2-32GB", 32 * _GIB, 900e9, _V100_PEAKS, 150e9, 25 * _GBIT),
    "a100-40gb": _ideal("A100-SXM4-40GB", 40 * _GIB, 1555e9, _A100_PEAKS, 300e9, 400 * _GBIT),
    "a100-80gb": _ideal("A100-SXM4-80GB", 80 * _GIB, 2039e9, _A100_PEAKS, 300e9, 400 * _GBIT),
    "h100": _ideal("H100-SXM5-80GB", 80 * _GIB, 3.35e12, _HOPPER_PEAKS, 450e9, 8 * 400 * _GBIT),
    # 141 GB on the sheet, 140 GiB as the driver reports it.
    "h200": _ideal("H200-SXM5-141GB", 140 * _GIB, 4.8e12, _HOPPER_PEAKS, 450e9, 8 * 400 * _GBIT),
    "b200": _ideal("B200-SXM", 180e9, 7.7e12, _B200_PEAKS, 900e9, 8 * 400 * _GBIT),
    "cpu": _ideal("CPU", 16 * _GIB, 10e9, _CPU_PEAKS, 5e9, 0.6e9, latencies=(20e-6, 200e-6)),
}

USABLE_MEMORY = 0.9
"""Of what the driver reports: the CUDA context and NCCL's buffers need the rest."""

DRIVER_MEMORY = {
    "V100-SXM2-16GB": 16_935_682_048,
    # PyTorch's reports of the same card: 31.75 GiB.
    "V100-SXM2-32GB": 34_089_730_048,
    "A100-SXM4-40GB": 42_331_013_120,
    "A100-SXM4-80GB": 85_100_068_864,
    "H100-SXM5-80GB": 84_942_979_072,
    # XLA's description has the label's 141 GiB; PyTorch reports 139.72 GiB.
    "H200-SXM5-141GB": 150_023_208_468,
    "B200-SXM": 191_514_411_008,
}
"""Bytes that the driver reports, by the name of a device; from XLA's descriptions of GPUs."""

COMPUTE_CAPABILITY = {
    "V100-SXM2-16GB": (7, 0),
    "V100-SXM2-32GB": (7, 0),
    "A100-SXM4-40GB": (8, 0),
    "A100-SXM4-80GB": (8, 0),
    "H100-SXM5-80GB": (9, 0),
    "H200-SXM5-141GB": (9, 0),
    "B200-SXM": (10, 0),
}
"""The generation of a GPU, by the name of its device; from XLA's descriptions of GPUs."""


def has_triton(device: str) -> bool:
    """Whether XLA makes matrix products and softmax with Triton: on GPUs since Ampere.

    A GPU without a description counts as one of the newest.
    """
    return device != "CPU" and COMPUTE_CAPABILITY.get(device, (9, 0)) >= (8, 0)


# Calculon's step functions for A100 (Isaev et al., 2023): shares of what the best matrix product
# reaches, at FLOPs that take an A100 as long, and shares of memory bandwidth by bytes.
_MATRIX_SHAPE = ((1e7, 0.1), (1e9, 0.6), (16e9, 0.9), (128e9, 1.0))
_MEMORY_SHAPE = ((64e3, 0.3), (1e6, 0.6), (10e6, 0.75), (100e6, 0.9))
_LAUNCH = 1e-6
"""Seconds; with Calculon's shares, a kernel of a few bytes takes little more."""

# Of the peak, at best. A100, Hopper, B200: the best shapes of bf16 matrix products (Bekman, Machine
# Learning Engineering): 271 of 312, 795 of 989 and 1745 of 2250 TFLOP/s. V100 with f16: between
# cuBLAS' best (83 of 112 TFLOP/s; Jia et al., Dissecting the NVIDIA Volta GPU Architecture via
# Microbenchmarking, 2018) and whole steps of Megatron's 1.2B model (62.4 of 125); with f32, and of
# the memory: what Alpa's own measurements on V100s suggest (`alpa.tools.measured_steps`).
_BEST = {
    "V100": {"f16": 0.64, "bf16": 0.64, "f32": 0.75},
    "A100": {"f32": 0.87},
    "H100": {"f32": 0.80},
    "H200": {"f32": 0.80},
    "B200": {"f32": 0.78},
}
_BEST_MEMORY = {"V100": 0.75}
"""Of Calculon's shares."""


def _rings(bandwidths: Mapping[int, float], start: float, step: float) -> Collectives:
    """Ring collectives of groups by size, with the bytes/s that each of their devices gets."""

    def costs(times: int) -> dict[int, Cost]:
        return {
            n: Cost(start + times * (n - 1) * step, times * (n - 1) / n / bandwidth)
            for n, bandwidth in bandwidths.items()
        }

    once = costs(1)
    return {
        "all-gather": once,
        "reduce-scatter": once,
        "all-to-all": once,
        "all-reduce": costs(2),
    }


def _costs(table: Mapping[int, tuple[float, float]]) -> dict[int, Cost]:
    """Of microseconds to start and GB/s of what one device holds of the array, by group size."""
    return {size: Cost(1e-6 * start, 1e-9 / rate) for size, (start, rate) in table.items()}


# NCCL counts 20 GB/s for each of a V100's six links (`topo.h`). Hosts of eight are a hybrid cube
# mesh (topology file of a DGX-1 in NCCL issue 671). GPUs 0 and 1 share one link, and collectives
# of all pairs wait for the slowest pair. Four GPUs in a row have two rings in both directions,
# eight have three. Four GPUs with gaps of one have one ring, but there is one figure per size.
# In an exchange each GPU sends to every other one. Of four, the slowest pair has one link. Of
# eight, three are not linked, and NCCL sends through a GPU in between: 10 messages share 6 links.
_V100_LINKS: Collectives = {
    **_rings({2: 20e9, 4: 80e9, 8: 120e9}, start=8e-6, step=4.9e-6),
    "all-to-all": _costs({2: (12.9, 40), 4: (22.7, 80), 8: (42.3, 96)}),
}
# All-reduces of 8 (Bekman): 76 us and 201 GB/s of bus bandwidth; other sources say 235.
_A100_LINKS: Collectives = {
    **_rings({2: 225e9, 4: 225e9, 8: 225e9}, start=8e-6, step=4.9e-6),
    "all-reduce": _rings({2: 201e9, 4: 201e9, 8: 201e9}, start=8e-6, step=4.9e-6)["all-reduce"],
}
# AutoParallel's tables; all-to-alls of 2 and 4 like all-gathers.
_H100_LINKS: Collectives = {
    "all-gather": _costs({2: (8, 537), 4: (17, 434), 8: (30, 394)}),
    "reduce-scatter": _costs({2: (8, 537), 4: (17, 434), 8: (30, 394)}),
    "all-reduce": _costs({2: (10, 324), 4: (15, 236), 8: (31, 267)}),
    "all-to-all": _costs({2: (8, 537), 4: (17, 434), 8: (50, 380)}),
}
# All-reduces of 8 (Bekman): 48 us, 462 GB/s of bus bandwidth, because the switch adds up. The
# others are H100's.
_H200_LINKS: Collectives = {
    **_H100_LINKS,
    "all-reduce": _costs({2: (10, 324), 4: (15, 236), 8: (48, 264)}),
}
# NCCL counts 722 GB/s (`topo.h`). All-reduces of 8 (Bekman): 53 us, 736 GB/s of bus bandwidth.
_B200_RINGS = _rings({2: 722e9, 4: 722e9, 8: 722e9}, start=5e-6, step=3.4e-6)
_B200_LINKS: Collectives = {
    **_B200_RINGS,
    "all-reduce": {**_B200_RINGS["all-reduce"], **_costs({8: (53, 420.6)})},
}
# All-reduces over whole hosts: AutoParallel's tables for H100; Bekman for B200 on EFA v4 (AWS
# P6-B200), 411 us and 384 GB/s of bus bandwidth.
_H100_HOSTS: Collectives = {"all-reduce": _costs({2: (53, 267), 4: (81, 160), 32: (165, 160)})}
_B200_HOSTS: Collectives = {"all-reduce": _costs({4: (411, 198.2)})}


# Transfers between meshes go through the memory of the hosts (`runtime/workers/transport/`). From a
# device to there JAX reaches 2.7 GB/s (jax issue 21438; PCIe 3 has 12 GB/s for pinned memory). A
# small message between two processes takes about 100 us, for the most part to wake its receiver.
_TO_HOST, _WAKE = 2.7e9, 1e-4


def _reached(
    name: str,
    inside: Collectives,
    *,
    share: float,
    latencies: tuple[float, float],
    hosts: Collectives | None = None,
    network: float = 0.8,
) -> Machine:
    """The ideal machine as programs find it.

    Args:
        inside: measured collectives in a host; `hosts`: over whole hosts.
        share: of the bandwidth inside a host that a ring gets; `network`: of that between hosts.
        latencies: seconds of a message inside a host and between hosts.
    """
    ideal = IDEAL[name]
    family = ideal.device.name[:4]
    memory = _BEST_MEMORY.get(family, 1.0)
    scale = ideal.device.peak("f16") / IDEAL["a100-40gb"].device.peak("f16")
    efficiency = Efficiency(
        matrix={
            dtype: tuple((scale * flops, best * reached) for flops, reached in _MATRIX_SHAPE)
            for dtype, best in _BEST[family].items()
        },
        memory=tuple((size, memory * reached) for size, reached in _MEMORY_SHAPE),
    )
    usable = int(USABLE_MEMORY * DRIVER_MEMORY[ideal.device.name])
    return Machine(
        device=replace(ideal.device, memory=usable, efficiency=efficiency, launch=_LAUNCH),
        intra_host=Link(
            bandwidth=share * ideal.intra_host.bandwidth,
            latency=latencies[0],
            collectives=inside,
            transfer=Transfer(bandwidth=_TO_HOST, latency=_WAKE),
        ),
        inter_host=Link(
            bandwidth=network * ideal.inter_host.bandwidth,
            latency=latencies[1],
            collectives=hosts or {},
            transfer=Transfer(
                bandwidth=network * ideal.inter_host.bandwidth, latency=_WAKE + latencies[1]
            ),
        ),
    )


# Networks: V100 hosts have TCP; EFA on P4d reaches 340 of 400 Gbit/s; a level of NCCL's trees over
# H100 hosts takes 28 us in AutoParallel's tables, and over B200 hosts with EFA v4 180 us.
_V100 = partial(_reached, inside=_V100_LINKS, share=0.8, latencies=(4.9e-6, 30e-6))
_A100 = partial(_reached, inside=_A100_LINKS, share=0.75, latencies=(4.9e-6, 20e-6), network=0.85)
_HOPPER = partial(_reached, share=0.78, latencies=(3.4e-6, 14e-6), hosts=_H100_HOSTS)

PRESETS = {
    "v100-16gb": _V100("v100-16gb"),
    "v100-32gb": _V100("v100-32gb"),
    "a100-40gb": _A100("a100-40gb"),
    "a100-80gb": _A100("a100-80gb"),
    "h100": _HOPPER("h100", inside=_H100_LINKS),
    "h200": _HOPPER("h200", inside=_H200_LINKS),
    "b200": _reached("b200", _B200_LINKS, share=0.8, latencies=(3.4e-6, 90e-6), hosts=_B200_HOSTS),
    # Virtual devices have no data sheet: their figures are estimates of what programs reach.
    "cpu": IDEAL["cpu"],
}
