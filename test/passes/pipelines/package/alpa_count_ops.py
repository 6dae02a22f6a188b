"""Says how many ops a function has: a pass that another package adds to Alpa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import body, ir, main_function
from alpa.passes.base import Pass, PassError, Remark, option


@dataclass(frozen=True, kw_only=True)
class CountOps(Pass):
    """Says how many ops the public function has."""

    name: ClassVar[str] = "count-ops"
    most: int = option(1000, "the most ops that are allowed")

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = main_function(module)
        number = len(body(function).operations)
        if number > self.most:
            raise PassError(function, f"@main has {number} ops, most={self.most}")
        remark(function.location, f"@main has {number} ops")
