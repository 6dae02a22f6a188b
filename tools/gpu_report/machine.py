"""What the device is, and how fast: versions, and the figures of `alpa-calibrate`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from alpa.passes.cost.device import size_text
from alpa.runtime.pjrt import all_devices, platform_versions
from alpa.tools import alpa_calibrate

_PACKAGES = ("alpa-mlir", "jax", "jaxlib", "ray")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a report says of the machine first."""

    about: Mapping[str, str]
    """device, driver and versions"""
    preset: str
    """the nearest one"""


def machine(*, on_cpu: bool) -> Machine:
    """Describes this process's device.

    Raises:
        RuntimeError: JAX finds no GPU.
    """
    device = all_devices()[0]
    if not on_cpu and device.platform != "gpu":
        raise RuntimeError(
            f"JAX finds no GPU, only {device.platform.upper()} devices; install the plug-in "
            '(pip install "jax[cuda12]") and check that nvidia-smi lists a GPU, or try the report '
            "with --devices cpu"
        )
    return Machine(about=_about(), preset=alpa_calibrate.nearest_preset(device))


def calibrate(file: Path, *, on_cpu: bool, quick: bool) -> str:
    """Measures this process's device and writes a cluster file, as `alpa-calibrate` does.

    Returns what was measured beside what the nearest preset assumes.

    Raises:
        RuntimeError: the measurement fails.
    """
    arguments = ["-o", str(file), "--check", "nearest", *(["--quick"] if quick else [])]
    arguments += ["--cpu-devices", "1"] if on_cpu else []
    printed, refused = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refused):
            status = alpa_calibrate.main(arguments)
    except jax.errors.JaxRuntimeError as error:
        # Errors of jaxlib cannot be sent to another process.
        raise RuntimeError(str(error)) from None
    if status:
        raise RuntimeError(refused.getvalue().strip())
    return printed.getvalue().rstrip()


def _about() -> dict[str, str]:
    """The device of this process, its driver, and the versions of everything."""
    device = jax.local_devices()[0]
    found = {
        "device": f"{len(jax.local_devices())} x {device.device_kind}",
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if statistics := device.memory_stats():
        found["memory of JAX's pool"] = size_text(int(statistics["bytes_limit"]))
    found |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    # A plug-in's version has several lines.
    versions = platform_versions(device)
    return found | {name: " ".join(value.split()) for name, value in versions.items()}
