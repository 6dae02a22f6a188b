"""What TAPAS searches, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alpa.passes.solve.tapas.mining import MIN_SIZE

Variant = Literal["pruned", "exhaustive"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The variant of the search, and its numbers."""

    variant: Variant = "pruned"
    min_support: int | Literal["auto"] = "auto"
    """instances of a frequent subgraph; `auto`: the number of layers, or two less"""
    min_size: int = MIN_SIZE
    """nodes of a frequent subgraph"""
    ranked: int = 10
    """strategies in the list"""
    width: int = 100
    """Branches of a level that are explored in the pruned variant. At 30, t5-tiny on 8 CPU devices
    costs 1.2 % more; gpt-tiny, moe-tiny, wresnet-tiny and llama-tiny cost the same."""
    most_sweeps: int = 400
    """double sweeps over the costs before the tree"""
    sweeps: int = 20
    gain: float = 1e-4
    """The sweeps end where so many of them raise the bound by less than this part of it."""
