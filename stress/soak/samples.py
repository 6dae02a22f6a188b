"""Samples of a run's resources, taken every few seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from alpa.runtime.executable import Executable
from alpa.runtime.process_usage import ProcessUsage


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The state of a run, and the steps since the previous sample.

    Attributes:
        seconds: since the first step.
        steps: the number of steps called.
        processes: of the run, by name.
        object_store_bytes: of all of Ray's nodes; None without Ray.
        checkpoint_files: in and below the folder of the checkpoints.
        step_seconds: the median of the steps since the previous sample.
        slow_step_seconds: the 99th percentile of these steps.
    """

    seconds: float
    steps: int
    processes: dict[str, ProcessUsage]
    object_store_bytes: float | None
    checkpoint_files: int
    step_seconds: float
    slow_step_seconds: float

    @classmethod
    def of(
        cls,
        executable: Executable,
        checkpoints: Path,
        seconds: float,
        steps: int,
        window: list[float],
    ) -> Sample:
        """Samples a run now; `window` are the seconds of the steps since the last sample."""
        return cls(
            seconds=seconds,
            steps=steps,
            processes=usage(executable),
            object_store_bytes=_object_store_bytes() if ray.is_initialized() else None,
            checkpoint_files=sum(len(files) for _, _, files in os.walk(checkpoints)),
            step_seconds=float(np.median(window)),
            slow_step_seconds=float(np.percentile(window, 99)),
        )


def usage(executable: Executable) -> dict[str, ProcessUsage]:
    """The resources of the caller, each worker, and the caller's child processes, by name."""
    return executable.usage() | _children()


def _object_store_bytes() -> float:
    name = "object_store_memory"
    return ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)


def _children() -> dict[str, ProcessUsage]:
    """The child processes of this one, such as Ray's; equal names are numbered."""
    found: dict[str, ProcessUsage] = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda it: int(it.name)):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != os.getpid():
                continue
            name, usage = _name(folder), ProcessUsage.of(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        number = sum(it.partition(" #")[0] == name for it in found)
        found[f"{name} #{number + 1}" if number else name] = usage
    return found


def _name(folder: Path) -> str:
    """The program of a process; for Python, the script."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    return scripts[0] if scripts else Path(words[0]).name
