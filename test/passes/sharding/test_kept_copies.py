"""The backward part reads the forward part's exchanged copy, unless it is larger."""

from __future__ import annotations

import pytest

from alpa.dialects import body, ir, main_function, mpmd, parse, sdy, walk
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import Sharding
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.kept_copies import return_copies

MESH = LogicalMesh.of(Cluster.parse("cpu:1x4"), 1, 4, (2, 2), ("a", "b"))
ROWS, COLUMNS, WHOLE = '[{"a"}, {}]', '[{}, {"a"}]', "[{}, {}]"
TEXT = """
!t = !mpmd.mesh_tensor<"m", tensor<8x8xf32>>
module {{
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(%x: !t) -> (!t, !t) attributes {{
      topology = #mpmd.topology<<"m" : <["a"=2, "b"=2]>>>}} {{
    %0:2 = mpmd.fragment<mesh="m", origin=["layer_0"], stage=0> (%x) {{alpa.part = "forward"}}
        (%a: tensor<8x8xf32>) {{
      %1 = stablehlo.tanh %a : tensor<8x8xf32>
      %2 = sdy.sharding_constraint %1 <@m, {forward}> : tensor<8x8xf32>
      %3 = stablehlo.cosine %2 : tensor<8x8xf32>
      mpmd.return %1, %3 : tensor<8x8xf32>, tensor<8x8xf32>
    }} : (!t) -> (!t, !t)
    %4 = mpmd.fragment<mesh="m", origin=["layer_0"(1)], stage=0> (%0#0)
        {{alpa.part = "backward", alpa.seconds = 3.0 : f64}}
        (%a: tensor<8x8xf32>) {{
      %1 = sdy.sharding_constraint %a <@m, {backward}> : tensor<8x8xf32>
      %2 = stablehlo.sine %1 : tensor<8x8xf32>
      %3 = stablehlo.add %2, {other} : tensor<8x8xf32>
      mpmd.return %3 : tensor<8x8xf32>
    }} : (!t) -> !t
    return %0#1, %4 : !t, !t
  }}
}}"""


def rewritten(made: str, forward: str, backward: str, other: str = "%1") -> tuple[str, int, float]:
    """The sharding in which the value crosses, the number of constraints that remain, and the
    seconds of the backward fragment, where each constraint takes one second.
    """
    module = parse(TEXT.format(forward=forward, backward=backward, other=other))
    with module.context:
        fragments = [
            op for op in body(main_function(module)).operations if isinstance(op, mpmd.FragmentOp)
        ]
        assert MeshTensor.from_type(fragments[0].results[0].type).mesh == "m"
        result = fragments[0].results[0]
        shardings: dict[ir.Value, Sharding] = {
            result: Sharding.from_attr(ir.Attribute.parse(f"#sdy.sharding<@m, {made}>")),
            fragments[0].results[1]: Sharding.of("m", ((), ())),
        }
        constraints = [op for op in walk(module.body) if isinstance(op, sdy.ShardingConstraintOp)]
        return_copies(fragments, shardings, MESH, {op.result: 1.0 for op in constraints})
        assert module.operation.verify()
        left = [op for op in walk(module.body) if isinstance(op, sdy.ShardingConstraintOp)]
        seconds = ir.FloatAttr(fragments[1].attributes["alpa.seconds"]).value
        return str(shardings[result].to_attr()), len(left), seconds


def test_an_exchanged_copy_crosses() -> None:
    assert rewritten(ROWS, COLUMNS, COLUMNS) == (f"#sdy.sharding<@m, {COLUMNS}>", 1, 2.0)


@pytest.mark.parametrize(
    ("made", "forward", "backward", "other"),
    [
        (ROWS, WHOLE, WHOLE, "%1"),  # a gathered copy would fill the memory
        (ROWS, COLUMNS, '[{}, {"b"}]', "%1"),  # another layout is required
        (ROWS, COLUMNS, COLUMNS, "%a"),  # and the value's own layout, too
    ],
)
def test_others_do_not(made: str, forward: str, backward: str, other: str) -> None:
    assert rewritten(made, forward, backward, other) == (f"#sdy.sharding<@m, {made}>", 2, 3.0)
