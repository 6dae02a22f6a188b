"""The compiler: one file is one pass; `pipeline` runs them, on their own or among MLIR's.

    import alpa.passes

    planned = alpa.passes.run(text, "alpa{cluster=cpu:2x4 num-layers=4}")

What stands here is loaded at its first use: the cost models and solvers below this package need no
MLIR and do not pay for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpa.dialects.attributes import CallCost
    from alpa.passes.base import Pass, PassError
    from alpa.passes.pipeline import PASSES, add_to, run
    from alpa.passes.pipelines.text import PipelineError
    from alpa.passes.sharding.call_costs import register_cost
    from alpa.passes.sharding.rules import register_sharding_rule

__all__ = [
    "PASSES",
    "CallCost",
    "Pass",
    "PassError",
    "PipelineError",
    "add_to",
    "register_cost",
    "register_sharding_rule",
    "run",
]

_HOME = {
    "PASSES": "passes.pipeline",
    "CallCost": "dialects.attributes",
    "Pass": "passes.base",
    "PassError": "passes.base",
    "PipelineError": "passes.pipelines.text",
    "add_to": "passes.pipeline",
    "register_cost": "passes.sharding.call_costs",
    "register_sharding_rule": "passes.sharding.rules",
    "run": "passes.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'alpa.passes' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"alpa.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
