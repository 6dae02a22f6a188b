"""Tries JAX and Ray in processes of their own, which may crash, hang, or hold a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

_LONGEST = 180.0
"""Seconds of a probe: on a slow machine, Ray needs a minute to start."""
_GRACE = 10.0
"""Seconds in which an ended process ends Ray."""
_LAST = 3
"""Lines of a failed process to show."""
_NO_POOL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""JAX otherwise takes 75 % of each GPU, which another program may use."""
_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What JAX sees, and whether a step could be planned for it and run."""

    platform: str | None = None
    """of the devices; None if JAX does not start"""
    kinds: tuple[str, ...] = ()
    """one for each device"""
    cluster: str | None = None
    """that the step was planned for; None if it failed"""
    seconds: float | None = None
    """of planning, compiling and running it"""
    problem: str = ""
    """the last lines of the process if it failed"""


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """The Ray cluster that Alpa would join, or one that was started and ended."""

    address: str | None = None
    """of the running cluster; None if none was found"""
    nodes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: float | None = None
    """that starting one took; None if one was found, or if that failed"""
    problem: str = ""
    """the last lines of the process if it failed"""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's driver and its GPUs."""

    version: str | None
    """None if there is no driver"""
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, folder: Path = _NVIDIA) -> Driver:
        """Reads what the driver's module says in a folder of files; it starts no GPU."""
        try:
            words = (folder / "version").read_text().split()
        except OSError:
            return cls(version=None, gpus=())
        numbers = (word for word in words if word.count(".") >= 1 and word[0].isdigit())
        gpus = [_model(file) for file in sorted(folder.glob("gpus/*/information"))]
        return cls(version=next(numbers, "unknown"), gpus=tuple(gpus))


def devices() -> Devices:
    """Starts JAX and runs a step."""
    said, problem = _said("alpa.tools.doctor.jax_probe", _NO_POOL)
    said["kinds"] = tuple(said.get("kinds", ()))
    return Devices(**said, problem=problem)


def ray_cluster() -> RayCluster:
    """Joins the running Ray cluster, or starts one."""
    said, problem = _said("alpa.tools.doctor.ray_probe", {})
    return RayCluster(**said, problem=problem)


def _model(information: Path) -> str:
    lines = (line.partition(":") for line in information.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name == "Model"), "unknown")


def _said(module: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What a process says in lines of JSON, and its last lines on standard error if it fails."""
    # Processes that Ray leaves behind would keep a pipe open.
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **environment},
        )
        status = _ended(process)
        output.seek(0)
        errors.seek(0)
        said: dict[str, Any] = {}
        for line in output:
            if line.startswith("{"):
                said |= json.loads(line)
        if status == 0:
            return said, ""
        last = [line.rstrip() for line in errors if line.strip()][-_LAST:]
    if status is None:
        last = [f"no answer within {_LONGEST:.0f} s", *last]
    return said, "\n".join(last or [f"the process ended with status {status}"])


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The status of a process; None if it had to be ended."""
    try:
        return process.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None
    except KeyboardInterrupt:
        process.terminate()
        raise
