"""What a process holds of its host, as Linux counts it in `/proc`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TICKS = os.sysconf("SC_CLK_TCK")  # per second, of the times in /proc


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Of one process, at one moment.

    Attributes:
        resident_bytes: of all its pages in memory.
        shared_out_bytes: the same, with each page that several processes map cut between them.
        own_bytes: of the pages that are no file's, such as heaps and stacks, swapped ones included.
            Unlike those of files, it is the same whatever other processes do.
        open_files: its file descriptors, sockets among them.
        sockets: those of them that are sockets.
        threads: of all its libraries.
        processor_seconds: since it began.
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
        """Of a process by its id, or of this one.

        Raises:
            OSError: there is no such process, or no `/proc`, as outside of Linux.
        """
        folder = Path("/proc") / str(process)
        kilobytes = _kilobytes(folder / "smaps_rollup")
        files = [_target(link) for link in (folder / "fd").iterdir()]
        # The name, in parentheses, may hold anything; the fields after it are numbers.
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
    """`Rss:   1740 kB`, a line for each number, after one that names the range."""
    _, *lines = path.read_text().splitlines()
    return {name: int(text.split()[0]) for name, text in (line.split(":") for line in lines)}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # closed meanwhile, as the one that lists the folder always is
