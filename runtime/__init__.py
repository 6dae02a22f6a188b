"""Runs planned programs: `load` gives a callable with the arguments of the original `@main`."""

from __future__ import annotations

from alpa.runtime.loading import LoadError, load
from alpa.runtime.local import Executable

__all__ = ["Executable", "LoadError", "load"]
