"""Plants mistakes of a compiler on purpose: the random programs must find each of them.

python -m stress.random_programs.faults --seed 0 --count 40
"""

from __future__ import annotations

from stress.random_programs.faults import carrying_out, scripts, stage_ops

FAULTS = (*stage_ops.FAULTS, *scripts.FAULTS, *carrying_out.FAULTS)

__all__ = ["FAULTS"]
