"""Shardings that `alpa.forced` fixes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from alpa import passes
from alpa.dialects import ir, main_function, parse
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.alpa import fingerprint, planned_for
from alpa.passes.stages.forced_shardings import Dims, write_forced

PROGRAM = """
func.func public @main(%x: tensor<64x8xf32> {alpa.role = "batch"}, %w: tensor<8x6xf32>)
    -> tensor<64x6xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x6xf32>) -> tensor<64x6xf32>
  return %y : tensor<64x6xf32>
}
"""


def planned(forced: Mapping[int, Dims]) -> ir.Module:
    module = parse(PROGRAM)
    with module.context:
        write_forced(main_function(module), forced)
    return passes.run(module, "alpa{cluster=cpu:1x4 mesh-shape=2x2}")


def test_an_argument_has_it() -> None:
    module = planned({1: (("axis1",), ())})
    types = [MeshTensor.from_type(it.type) for it in main_function(module).arguments]
    assert [it.sharding and it.sharding.axis_names for it in types][1] == (("axis1",), ())
    assert "alpa.forced" not in main_function(module).attributes


def test_the_plan_is_that_of_the_program() -> None:
    assert planned_for(planned({1: ((), ())})) == fingerprint(parse(PROGRAM))


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        ((("axis0",),), r"cannot be forced to \[axis0\]; give axes, or -, for each of its 2 dim"),
        ((("x",), ()), r"on @mesh_0: the mesh has no axis x, it has axis0=2, axis1=2"),
        (((), ("axis0", "axis1")), "dimension 1 has 6 elements, which 4 devices do not divide"),
    ],
)
def test_what_cannot_be_forced(dims: Dims, problem: str) -> None:
    with pytest.raises(ir.MLIRError, match=problem):
        planned({1: dims})


def test_it_is_not_the_programs_own() -> None:
    text = PROGRAM.replace(
        "%w: tensor<8x6xf32>", '%w: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}, {}]>}'
    )
    module = parse(f'sdy.mesh @m = <["a"=4]>\n{text}')
    with module.context:
        write_forced(main_function(module), {1: ((), ())})
    with pytest.raises(ir.MLIRError, match=r"it is \[a, -\] in the program"):
        passes.run(module, "alpa{cluster=cpu:1x4}")
