"""Figures of well-known machines, by the name that stands before the shape in ``h100:4x8``.

Peaks are the vendors' dense figures (no structured sparsity). From Ampere on, ``f32`` is the TF32
figure, because that is how XLA runs f32 matrix products at its default precision. Intra-host
bandwidth is NVLink's per device and direction, half of the total on the data sheets. Latencies are
round estimates of one step of a collective (NVLink 5 us, network 20 us), not data-sheet figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from alpa.passes.cost.device import Device, Link, Machine

_GIB = 2**30
_GBIT = 1e9 / 8
"""bytes/s in one Gbit/s"""

# NVIDIA V100 data sheet, SXM2; six NVLinks of 25 GB/s per direction. Volta has no bf16 units:
# bf16 stands for f16 here, so that a plan for f16 can be read from a bf16 program.
# Network: AWS p3.16xlarge, 25 Gbit/s per host, the testbed of the Alpa paper (section 8).
_V100 = {"f16": 125e12, "bf16": 125e12, "f32": 15.7e12, "f64": 7.8e12}
# NVIDIA A100 data sheet, SXM4: TF32 156, f16/bf16 312, f64 tensor cores 19.5, int8 624 T/s;
# NVLink 600 GB/s in total. Network: AWS p4d.24xlarge, 400 Gbit/s per host.
_A100 = {"f16": 312e12, "bf16": 312e12, "f32": 156e12, "f64": 19.5e12, "i8": 624e12}
# NVIDIA H100 and H200 data sheets, SXM5 (sparse figures halved): TF32 495, f16/bf16 989,
# f8 and int8 1979, f64 tensor cores 67 T/s; NVLink 900 GB/s in total.
# Network: eight 400 Gbit/s adapters per host (DGX H100, AWS p5.48xlarge).
_HOPPER = {"f8": 1979e12, "f16": 989e12, "bf16": 989e12, "f32": 495e12, "f64": 67e12, "i8": 1979e12}
# NVIDIA HGX B200 data sheet, per device (sparse figures halved): f8 and int8 4.5, f16/bf16
# 2.25, TF32 1.12 PFLOP/s, f64 37 TFLOP/s; 180 GB, 7.7 TB/s; NVLink 1.8 TB/s in total.
# Network: eight 400 Gbit/s adapters per host (DGX B200).
_B200 = {"f8": 4.5e15, "f16": 2.25e15, "bf16": 2.25e15, "f32": 1.12e15, "f64": 37e12, "i8": 4.5e15}
# One XLA virtual device on one core of a laptop, for tests and trials: about 50 GFLOP/s of f32
# and a share of the memory's bandwidth. Half types are computed in f32. Collectives inside a
# process are copies through memory; between processes jax.experimental.transfer gave 0.6 GB/s.
_CPU = {"f16": 50e9, "bf16": 50e9, "f32": 50e9, "f64": 25e9}


def _machine(
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


PRESETS = {
    "v100-16gb": _machine("V100-SXM2-16GB", 16 * _GIB, 900e9, _V100, 150e9, 25 * _GBIT),
    "v100-32gb": _machine("V100-SXM2-32GB", 32 * _GIB, 900e9, _V100, 150e9, 25 * _GBIT),
    "a100-40gb": _machine("A100-SXM4-40GB", 40 * _GIB, 1555e9, _A100, 300e9, 400 * _GBIT),
    "a100-80gb": _machine("A100-SXM4-80GB", 80 * _GIB, 2039e9, _A100, 300e9, 400 * _GBIT),
    "h100": _machine("H100-SXM5-80GB", 80 * _GIB, 3.35e12, _HOPPER, 450e9, 8 * 400 * _GBIT),
    # 141 GB on the sheet, 140 GiB as the driver reports it.
    "h200": _machine("H200-SXM5-141GB", 140 * _GIB, 4.8e12, _HOPPER, 450e9, 8 * 400 * _GBIT),
    "b200": _machine("B200-SXM", 180e9, 7.7e12, _B200, 900e9, 8 * 400 * _GBIT),
    "cpu": _machine("CPU", 16 * _GIB, 10e9, _CPU, 5e9, 0.6e9, latencies=(20e-6, 200e-6)),
}
