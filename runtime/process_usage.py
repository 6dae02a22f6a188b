"""The memory, files and threads of a process, as Linux counts them in `/proc`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TICKS = os.sysconf("SC_CLK_TCK")  # per second, in /proc


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """The resources of one process at one moment.

    Attributes:
        resident_bytes: all its pages in memory.
        shared_out_bytes: the same, but a page that several processes map is divided among them.
        own_bytes: pages that belong to no file, such as heaps and stacks, swapped ones included.
            Other processes do not affect this number.
        open_files: its file descriptors, sockets included.
        sockets: its sockets.
        threads: the threads of all its libraries.
        processor_seconds: since it started.
    """

    resident_bytes: int
    shared_out_bytes: int
    own_bytes: int
    open_files: int
    sockets: int
    threads: int
    processor_seconds: float

    @classmethod
    def of(cls, process: int | Literal["self"] = "self") -> ProcessUsage:
        """Reads the resources of a process by its id, or of this one.

        Raises:
            OSError: there is no such process, or no `/proc` (on systems other than Linux).
        """
        folder = Path("/proc") / str(process)
        kilobytes = _kilobytes(folder / "smaps_rollup")
        files = [_target(link) for link in (folder / "fd").iterdir()]
        # The name, in parentheses, may contain anything; the fields after it are numbers.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        user, system, threads = int(fields[11]), int(fields[12]), int(fields[17])
        return cls(
            resident_bytes=1024 * kilobytes["Rss"],
            shared_out_bytes=1024 * kilobytes["Pss"],
            own_bytes=1024 * (kilobytes["Anonymous"] + kilobytes["Swap"]),
            open_files=len(files),
            sockets=sum(target.startswith("socket:") for target in files),
            threads=threads,
            processor_seconds=(user + system) / _TICKS,
        )


def _kilobytes(path: Path) -> dict[str, int]:
    """Parses `Rss:   1740 kB`: one line per number, after one that names the range."""
    _, *lines = path.read_text().splitlines()
    return {name: int(text.split()[0]) for name, text in (line.split(":") for line in lines)}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # closed meanwhile, as the descriptor that lists the folder always is
