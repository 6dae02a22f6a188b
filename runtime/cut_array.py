"""A state that is cut between meshes, as the caller holds it from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from alpa.dialects.attributes import Slice
from alpa.runtime.mesh_array import MeshArray


class CutArray(MeshArray):
    """An array in parts, each on its mesh, which are joined when it is looked at.

    The next step takes the parts as they are. `parts` are by what they are slices of.
    """

    def __init__(self, parts: Mapping[Slice, jax.Array | MeshArray]) -> None:
        self.parts: dict[Slice, Any] = dict(sorted(parts.items(), key=lambda item: item[0].start))
        cut, first = next(iter(self.parts.items()))
        rows = max(part.stop for part in self.parts)
        shape = (*first.shape[: cut.dim], rows, *first.shape[cut.dim + 1 :])
        super().__init__(shape, first.dtype)
        self._dim = cut.dim

    def fetch(self) -> np.ndarray:
        return np.concatenate([np.asarray(part) for part in self.parts.values()], self._dim)

    def __repr__(self) -> str:
        return f"CutArray({self.dtype}{list(self.shape)} in {len(self.parts)} parts)"

    def block_until_ready(self) -> CutArray:
        """Waits until all parts are computed."""
        jax.block_until_ready(list(self.parts.values()))
        return self

    def check_alive(self) -> None:
        for part in self.parts.values():
            if isinstance(part, MeshArray):
                part.check_alive()

    def is_deleted(self) -> bool:
        """Whether a part was donated to a step."""
        return any(part.is_deleted() for part in self.parts.values())


def part_of(array: Any, slice_: Slice) -> Any:
    """The part of an array that a slice takes: as it is where the array is cut so."""
    if isinstance(array, CutArray):
        if slice_ in array.parts:
            return array.parts[slice_]
        array = np.asarray(array)
    return array[(*[slice(None)] * slice_.dim, slice(slice_.start, slice_.stop))]
