"""`verify-layers`: checks that every part of a step stands in the right layer or stage.

It takes what `layer-cluster` makes, or a plan from `stage-mesh-partition` on, and changes nothing.
Those two passes check what they make in the same way; the pass is for modules that somebody else
wrote or changed.

Options: none.

Fails when (`analysis/layer_checks.py` has the reasons):
    an op is outside of any layer, or a layer is there twice; a value flows from a later stage or
    layer to an earlier one in the forward part, the other way in the backward part, or from an
    update into either; a backward computation adds to a gradient what another layer or mesh made
    of it; an update mixes layers and is not `update_global`; on meshes, a layer's backward or
    update is apart from its forward, stages are no intervals of layers, or one copy of a state is
    not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import ir
from alpa.dialects.mpmd_types import read_topology
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.layer_checks import check_layers, check_stages


@dataclass(frozen=True, kw_only=True)
class VerifyLayers(Pass):
    """Checks that every part of a step stands in the right layer or stage."""

    name: ClassVar[str] = "verify-layers"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module)
        if read_topology(function):
            check_stages(module, function)
        else:
            check_layers(function)
