"""The blocks of a random program, and what it is given besides its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stress.random_programs.layers import Layer
from stress.random_programs.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer in a program, with the number of the block that owns its parameters.

    `skip` is the number of a block whose output is added to its own, -1 for the input.
    """

    layer: Layer
    owner: int
    skip: int | None = None
    checkpoint: bool = False
    boundary: bool = False

    def __str__(self) -> str:
        notes = [
            f" +skip {self.skip}" if self.skip is not None else "",
            f" shares {self.owner}" if self.shared else "",
            " checkpoint" if self.checkpoint else "",
            " |" if self.boundary else "",
        ]
        return self.layer.name + "".join(notes)

    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of one step besides the state, as the program computes with them."""

    batch: Mapping[str, Any]
    weights: Any
    flag: Any
    noise: Noise
