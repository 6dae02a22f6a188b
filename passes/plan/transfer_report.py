"""What crosses between the meshes of a plan, in numbers: a part of its report (`report.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from alpa.passes.plan.data import Program

Per = Literal["micro-batch", "step"]


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """A tensor that crosses from mesh to mesh, `per` micro-batch or step.

    `bytes` are those of the whole tensor, the others what crosses links between and inside hosts.
    None before `insert-cross-mesh-reshard`.
    """

    bytes: int
    source: str
    target: str
    per: Per
    method: str | None
    seconds: float | None
    """each time; a gather that follows is its reader's"""
    slow_bytes: int | None
    fast_bytes: int | None


def transfers_of(program: Program) -> Iterator[TransferReport]:
    """The transfers: per micro-batch if a version of each one is read, otherwise per step."""
    for step in program.transfers:
        often = step.target in program.micro_used
        pers: list[Per] = ["micro-batch"] if often else ["step"]
        if often and step.target in program.totals:
            pers.append("step")
        for per in pers:
            yield TransferReport(
                bytes=program.values[step.target].bytes,
                source=program.values[step.source].mesh,
                target=program.values[step.target].mesh,
                per=per,
                method=step.method,
                seconds=None if step.method is None else step.seconds,
                slow_bytes=step.slow_bytes,
                fast_bytes=step.fast_bytes,
            )
