"""Measures this machine's devices and writes them as a cluster file.

    alpa-calibrate -o cluster.toml

Matrix products and convolutions by type and size, element-wise ops and memory traffic by size, the
start of kernels, calls of modules, collectives by group size and bytes, moves between meshes, and
computation beside communication. All devices work at the same time, as in a training step. Small
training steps are then planned with these figures and run, and correct them. One device gives the
figures of computation alone; what is between hosts is not measured, but taken from a preset.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
from jaxlib import version

from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import Machine
from alpa.passes.cost.presets import PRESETS
from alpa.runtime.calibration.fit import fit
from alpa.runtime.calibration.in_programs import in_programs
from alpa.runtime.calibration.measure import Sample, Sizes, measure
from alpa.runtime.calibration.programs import CPU_MODELS, GPU_MODELS, program_samples
from alpa.runtime.calibration.text import calibrated_text, comparison_text
from alpa.runtime.progress import progress
from alpa.tools.arguments import add_version, count
from alpa.tools.devices import make_devices
from alpa.tools.interrupts import until_interrupted

_QUICK = Sizes(
    matrices=(64, 256), dtypes=("f32",), images=(8, 16), elements=(2**12, 2**16),
    bytes=(2**14, 2**20), payloads=(2**14, 2**18), arguments=(16, 64), runs=3, seconds=0.005,
    longest=8,
)  # fmt: skip
_GPU = Sizes(
    matrices=(128, 256, 512, 1024, 2048, 4096, 8192),
    images=(8, 16, 32, 64, 128),
    channels=128,
    elements=tuple(2**n for n in range(10, 27, 2)),
    bytes=tuple(2**n for n in range(14, 31, 2)),
    payloads=tuple(2**n for n in range(14, 29, 2)),
)
_STEPS = 10
"""That a GPU is given in a row: it does not wait for the host between them."""
_PRESETS = {
    "V100": "v100-16gb",
    "A100": "a100-40gb",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
}
"""By a part of the name that a driver gives a GPU."""

_NEAREST = "nearest"
_EXAMPLES = """\
examples:
  alpa-calibrate -o cluster.toml                  the GPUs of this machine, or 4 CPU devices
  alpa-calibrate --cpu-devices 8 -o cpu.toml
  alpa-calibrate --check h100                     measured beside what the preset assumes
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="alpa-calibrate",
        description="Measures this machine's devices, and writes a cluster file or compares them "
        "with a preset.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(result)
    add = result.add_argument
    add("-o", "--output", type=Path, metavar="CLUSTER.toml", help="default: standard output")
    add(
        "--check",
        metavar="C",
        help="a preset such as h100, `nearest` for the nearest one, or a cluster file: print what "
        "was measured beside what it assumes, and write no cluster file unless -o is given",
    )
    add(
        "--cpu-devices",
        type=count,
        metavar="N",
        help="measure N virtual CPU devices; default: the GPUs, or 4 CPU devices without any",
    )
    add("--quick", action="store_true", help="few sizes and runs, to try the command")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 for an error."""
    options = parser().parse_args(arguments)
    try:
        assumed = None if options.check in (None, _NEAREST) else _machine(options.check)
    except ClusterError as error:
        print(f"alpa-calibrate: error: {error}", file=sys.stderr)
        return 1
    if options.output is not None and not options.output.absolute().parent.is_dir():
        print(f"alpa-calibrate: error: there is no folder for {options.output}", file=sys.stderr)
        return 1
    devices = _devices(options.cpu_devices)
    if options.check == _NEAREST:
        assumed = PRESETS[nearest_preset(devices[0])]
    on_cpu = devices[0].platform == "cpu"
    sizes = _QUICK if options.quick else Sizes() if on_cpu else _GPU
    if not on_cpu:
        sizes = replace(sizes, arguments=())  # The host calls modules while the device computes.
    load = os.getloadavg()[0]
    samples = list(_shown(measure(devices, sizes)))
    if assumed is not None:
        print("\n".join(comparison_text(samples, assumed)))
    if assumed is None or options.output is not None:
        preset = nearest_preset(devices[0])
        found = fit(
            samples,
            name=PRESETS[preset].device.name,
            memory=_memory(devices),
            inter_host=PRESETS[preset].inter_host,
        )
        comment = f"Not measured: the link between hosts is that of the preset {preset}."
        models = CPU_MODELS if on_cpu else GPU_MODELS
        models, runs = (models[::3], 3) if options.quick else (models, sizes.runs)
        chains = partial(calibrated_text, found, about={}, comment=comment)
        found = in_programs(
            found,
            program_samples(
                devices,
                lambda n: chains(hosts=1, devices_per_host=n),
                models,
                runs,
                in_a_row=None if on_cpu else _STEPS,
            ),
        )
        about, number = _about(devices, load), len(devices)
        text = calibrated_text(
            found, hosts=1, devices_per_host=number, about=about, comment=comment
        )
        if options.output is None:
            print(text, end="")
        else:
            options.output.write_text(text, encoding="utf-8")
    return 0


def command() -> NoReturn:
    """The command `alpa-calibrate`."""
    sys.exit(until_interrupted("alpa-calibrate", main))


def _machine(text: str) -> Machine:
    """The machine of a preset, with or without a shape, or of a file."""
    return PRESETS[text] if text in PRESETS else Cluster.parse(text)


def _devices(cpu_devices: int | None) -> Sequence[Any]:
    """The GPUs that jax sees, or virtual CPU devices."""
    if cpu_devices is not None:
        make_devices(cpu_devices)
        return jax.devices()[:cpu_devices]
    jax.config.update("jax_num_cpu_devices", 4)
    return jax.devices()


def nearest_preset(device: Any) -> str:
    """The name of the preset that is nearest to a device."""
    if device.platform == "cpu":
        return "cpu"
    kind = device.device_kind
    return next((preset for part, preset in _PRESETS.items() if part in kind), "h100")


def _memory(devices: Sequence[Any]) -> int:
    """Bytes of a device for programs: jax's pool on a GPU, a share of the machine's on CPU."""
    statistics = devices[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def _about(devices: Sequence[Any], load: float) -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "platform": str(devices[0].client.platform_version).splitlines()[0],
        "jax": jax.__version__,
        "jaxlib": version.__version__,
        "python": platform.python_version(),
        "load": f"{load:.2f} before, on {os.cpu_count()} processors",
    }


def _shown(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Names on a terminal what is measured."""
    with progress("measure") as show:
        for number, sample in enumerate(samples, start=1):
            show(f"measured {number}: {sample.what}, size {sample.size:.3g}")
            yield sample


if __name__ == "__main__":
    command()
