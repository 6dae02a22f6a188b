"""Keeps what the classes of layers cost on meshes in a folder, for later searches.

A file holds the answer for one mesh. Its name is a hash of all that the answer depends on: the
programs of the classes, their layers, the cluster, the micro-batches, what was asked, and the
compiler itself. The programs name their schedule, so that another one has other files.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np

from alpa import dialects
from alpa.passes.stages.class_costs import ClassCosts, Costs, LeastSeconds
from alpa.passes.stages.class_problem import ClassSolver


class FolderError(Exception):
    """The folder cannot be read or written; the message names a file."""


_UNREADABLE = (ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""Errors of a file that was cut off, or is not ours. It is written anew."""


@dataclass(frozen=True, kw_only=True)
class CostsFolder:
    """Answers of one solver in a folder, which several processes may share."""

    path: Path
    solver: ClassSolver

    def file(self, *question: object) -> Path:
        """Where the answer to a question about a mesh is; see `Costing.begin`."""
        return self.path / f"{_hash(self._solver_hash, *question)}.npz"

    def read(self, file: Path) -> Costs | LeastSeconds | None:
        """The answer in a file; None if there is none, or only a part of one.

        Raises:
            FolderError: the file may not be read.
        """
        try:
            with np.load(file) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            if "bound" in found:
                return LeastSeconds(seconds=found["bound"])
            links, ends = list(self.solver.classes.links), list(self.solver.exchanged)
            rows = zip(found["by_class"], found["links"], found["exchanged"], strict=True)
            return [
                ClassCosts(
                    by_class=by_class,
                    links=dict(zip(links, seconds.tolist(), strict=True)),
                    exchanged=dict(zip(ends, held.tolist(), strict=True)),
                )
                for by_class, seconds, held in rows
            ]
        except (FileNotFoundError, *_UNREADABLE):
            return None
        except OSError as error:
            raise FolderError(f"{file}: {error.strerror}") from error

    def write(self, file: Path, answer: Costs | LeastSeconds) -> None:
        """Writes an answer, whole or not at all. Raises FolderError."""
        if isinstance(answer, LeastSeconds):
            arrays = {"bound": answer.seconds}
        else:
            links, ends = self.solver.classes.links, self.solver.exchanged
            arrays = {
                "by_class": np.array([it.by_class for it in answer]),
                "links": np.array([[it.links[link] for link in links] for it in answer]),
                "exchanged": np.array([[it.exchanged[end] for end in ends] for it in answer]),
            }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path) as folder:
                whole = Path(folder) / file.name
                np.savez(whole, allow_pickle=False, **arrays)
                whole.replace(file)
        except OSError as error:
            raise FolderError(f"{error.filename or file}: {error.strerror}") from error

    @cached_property
    def _solver_hash(self) -> str:
        classes, plan = self.solver.classes, self.solver.plan
        layers = [
            (one.layers, *map(sorted, (one.boundary, one.kept, one.stays, one.totals)))
            for one in classes.classes
        ]
        return _hash(
            _compiler_hash(),
            str(classes.module),
            layers,
            classes.class_of,
            list(classes.links.items()),
            (plan.num_micro_batches, plan.accumulate_dtype),
            self.solver.cluster,
            self.solver.intra,
        )


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _compiler_hash() -> str:
    """Of the sources and the versions that answers depend on."""
    sources = [
        source.read_bytes()
        for package in (Path(dialects.__file__).parent, Path(__file__).parents[1])
        for source in sorted(package.rglob("*.py"))
    ]
    return _hash([version(name) for name in ("jaxlib", "numpy", "scipy")], sources)
