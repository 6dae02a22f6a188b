"""Figures of well-known machines, by the name that stands before the shape in ``h100:4x8``.

Peaks are the vendors' dense figures (no structured sparsity). From Ampere on, ``f32`` is the TF32
figure, because that is how XLA runs f32 matrix products at its default precision. Intra-host
bandwidth is NVLink's per device and direction, half of the total on the data sheets. Latencies are
round estimates of one step of a collective (NVLink 5 us, network 20 us), not data-sheet figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa.passes.cost.device import Device, Link

_GIB = 2**30
_GBIT = 1e9 / 8
"""bytes/s in one Gbit/s"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A device with its links; a shape makes it a cluster."""

    device: Device
    intra_host: Link
    inter_host: Link


def _nvlink(bandwidth: float) -> Link:
    return Link(bandwidth=bandwidth, latency=5e-6)


def _network(bandwidth: float) -> Link:
    return Link(bandwidth=bandwidth, latency=20e-6)


def _v100(gib: int) -> Preset:
    # NVIDIA V100 data sheet, SXM2; six NVLinks of 25 GB/s per direction. Volta has no bf16 units:
    # bf16 stands for f16 here, so that a plan for f16 can be read from a bf16 program.
    # Network: AWS p3.16xlarge, 25 Gbit/s per host, the testbed of the Alpa paper (section 8).
    peaks = {"f16": 125e12, "bf16": 125e12, "f32": 15.7e12, "f64": 7.8e12}
    return Preset(
        device=Device(
            name=f"V100-SXM2-{gib}GB",
            memory=gib * _GIB,
            peak_flops=peaks,
            memory_bandwidth=900e9,
        ),
        intra_host=_nvlink(150e9),
        inter_host=_network(25 * _GBIT),
    )


def _a100(gib: int, memory_bandwidth: float) -> Preset:
    # NVIDIA A100 data sheet, SXM4: TF32 156, f16/bf16 312, f64 tensor cores 19.5, int8 624 T/s;
    # NVLink 600 GB/s in total. Network: AWS p4d.24xlarge, 400 Gbit/s per host.
    peaks = {"f16": 312e12, "bf16": 312e12, "f32": 156e12, "f64": 19.5e12, "i8": 624e12}
    return Preset(
        device=Device(
            name=f"A100-SXM4-{gib}GB",
            memory=gib * _GIB,
            peak_flops=peaks,
            memory_bandwidth=memory_bandwidth,
        ),
        intra_host=_nvlink(300e9),
        inter_host=_network(400 * _GBIT),
    )


def _hopper(name: str, gib: int, memory_bandwidth: float) -> Preset:
    # NVIDIA H100 and H200 data sheets, SXM5 (sparse figures halved): TF32 495, f16/bf16 989,
    # f8 and int8 1979, f64 tensor cores 67 T/s; NVLink 900 GB/s in total.
    # Network: eight 400 Gbit/s adapters per host (DGX H100, AWS p5.48xlarge).
    peaks = {
        "f8": 1979e12,
        "f16": 989e12,
        "bf16": 989e12,
        "f32": 495e12,
        "f64": 67e12,
        "i8": 1979e12,
    }
    return Preset(
        device=Device(
            name=name, memory=gib * _GIB, peak_flops=peaks, memory_bandwidth=memory_bandwidth
        ),
        intra_host=_nvlink(450e9),
        inter_host=_network(8 * 400 * _GBIT),
    )


def _b200() -> Preset:
    # NVIDIA HGX B200 data sheet, per device (sparse figures halved): f8 and int8 4.5, f16/bf16
    # 2.25, TF32 1.12 PFLOP/s, f64 37 TFLOP/s; 180 GB, 7.7 TB/s; NVLink 1.8 TB/s in total.
    # Network: eight 400 Gbit/s adapters per host (DGX B200).
    peaks = {
        "f8": 4.5e15,
        "f16": 2.25e15,
        "bf16": 2.25e15,
        "f32": 1.12e15,
        "f64": 37e12,
        "i8": 4.5e15,
    }
    return Preset(
        device=Device(
            name="B200-SXM", memory=int(180e9), peak_flops=peaks, memory_bandwidth=7.7e12
        ),
        intra_host=_nvlink(900e9),
        inter_host=_network(8 * 400 * _GBIT),
    )


def _cpu() -> Preset:
    # One XLA virtual device on one core of a laptop, for tests and trials: about 50 GFLOP/s of f32
    # and a share of the memory's bandwidth. Half types are computed in f32. Collectives inside a
    # process are copies through memory; between processes jax.experimental.transfer gave 0.6 GB/s.
    peaks = {"f16": 50e9, "bf16": 50e9, "f32": 50e9, "f64": 25e9}
    return Preset(
        device=Device(name="CPU", memory=16 * _GIB, peak_flops=peaks, memory_bandwidth=10e9),
        intra_host=Link(bandwidth=5e9, latency=20e-6),
        inter_host=Link(bandwidth=0.6e9, latency=200e-6),
    )


PRESETS = {
    "v100-16gb": _v100(16),
    "v100-32gb": _v100(32),
    "a100-40gb": _a100(40, 1555e9),
    "a100-80gb": _a100(80, 2039e9),
    "h100": _hopper("H100-SXM5-80GB", 80, 3.35e12),
    # 141 GB on the sheet, 140 GiB as the driver reports it.
    "h200": _hopper("H200-SXM5-141GB", 140, 4.8e12),
    "b200": _b200(),
    "cpu": _cpu(),
}
