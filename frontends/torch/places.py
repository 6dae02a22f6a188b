"""The lines of the user's code that ops and errors of PyTorch come from."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

_PACKAGES = tuple(str(Path(path)) for path in (*torch.__path__, __file__[: -len("/places.py")]))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of a file, and the function around it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def located(place: Place | None, message: str) -> str:
    """A message that begins with its place, if that is known."""
    return message if place is None else f"{place}: {message}"


def place_of(node: fx.Node) -> Place | None:
    """The innermost line outside of PyTorch that a node comes from.

    PyTorch records lines of `forward`s only.
    """
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
    for file, line, function in reversed(found):
        if _is_user(file):
            return Place(file=file, line=int(line), function=function)
    return None


def place_in(trace: TracebackType | None) -> Place | None:
    """The innermost line of a traceback outside of PyTorch and Alpa."""
    found: Place | None = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_user(code.co_filename):
            found = Place(file=code.co_filename, line=trace.tb_lineno, function=code.co_name)
        trace = trace.tb_next
    return found


def place_here() -> Place | None:
    """The innermost line around the caller outside of PyTorch and Alpa."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if _is_user(code.co_filename):
            return Place(file=code.co_filename, line=line, function=code.co_name)
    return None


def _is_user(file: str) -> bool:
    """Whether a file is the user's: neither PyTorch's, nor Alpa's, nor code that PyTorch wrote."""
    return not file.startswith((*_PACKAGES, "<"))
