"""The policy of each set of options, options that exclude each other, and the resulting meshes."""

from __future__ import annotations

import re

import pytest

import alpa.passes
from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import read_meshes
from alpa.passes.stages.policy import logical_shapes

PROGRAM = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


SHARDED = PROGRAM.replace("func.func", 'sdy.mesh @m = <["a"=2, "b"=2]>\nfunc.func').replace(
    "%x: tensor<4xf32>) ->", '%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}]>}) ->'
)


def meshes(program: str, options: str) -> list[tuple[str, tuple[int, ...]]]:
    """The name and the logical shape of each mesh of the plan."""
    module = parse(program)
    alpa.passes.run(module, f"stage-mesh-partition{{cluster=cpu:1x4 {options}}}")
    return [(mesh.name, mesh.logical_shape) for mesh in read_meshes(main_function(module))]


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        (PROGRAM, "mesh-shape=4x1", [("mesh_0", (4, 1))]),
        (PROGRAM, "meshes=0-1:2,2-3:2", [("mesh_0", (2,)), ("mesh_1", (2,))]),
        (SHARDED, "", [("m", (2, 2))]),
        (SHARDED, "num-stages=1 mesh-shape=2x2 equal-layers=true", [("m", (2, 2))]),
        (SHARDED, "meshes=0-3:4", [("m", (2, 2))]),
        (SHARDED, "fixed-stages=0:1x4", [("m", (2, 2))]),
        (SHARDED, "fixed-stages=0-0:1x4:2x2", [("m", (2, 2))]),
    ],
)
def test_options_choose_the_meshes(
    program: str, options: str, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert meshes(program, options) == expected


@pytest.mark.parametrize(
    ("program", "fixed", "other", "remedy"),
    [
        *(
            (PROGRAM, "meshes=0-3:4", other, "meshes")
            for other in ("num-stages=1", "mesh-shape=4", "equal-layers=true")
        ),
        *(
            (SHARDED, "", other, "the shardings")
            for other in ("fixed-stages=0:1x2", "fixed-stages=0:1x4:4", "mesh-shape=4")
        ),
    ],
)
def test_options_that_exclude_each_other_are_named(
    program: str, fixed: str, other: str, remedy: str
) -> None:
    what = f"{fixed} fixes all meshes" if fixed else "over @m fix one mesh of 2x2"
    name = other.partition("=")[0]
    message = f"{what}, so {other} is not possible; leave out {name} or {remedy}"
    with pytest.raises(ir.MLIRError, match=re.escape(message)):
        meshes(program, f"{fixed} {other}")


def test_logical_shapes_of_a_submesh() -> None:
    assert logical_shapes(1, 1, 2) == [(1,)]
    assert logical_shapes(1, 2, 2) == [(2,)]
    assert logical_shapes(1, 8, 2) == [(2, 4)]
    assert logical_shapes(1, 8, 1) == [(8,)]
    assert logical_shapes(1, 16, 2) == [(2, 8), (4, 4)]
    assert logical_shapes(2, 8, 2) == [(2, 8), (4, 4), (8, 2)]
    assert logical_shapes(3, 1, 2) == [(3, 1)]
    assert logical_shapes(1, 4, 2, ordered=True) == [(1, 4), (2, 2), (4, 1)]
    assert logical_shapes(2, 2, 2, ordered=True) == [(2, 2), (4, 1)]
