"""Accumulators of 16-bit gradients: every memory model counts the bytes of f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function, mpmd, parse
from alpa.dialects.attributes import read_arguments, read_results
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan, Reshard
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.plan.predicted_collectives import predicted_collectives
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.passes.plan.reader import read_planned
from alpa.passes.stages.accumulators import widen_accumulators
from alpa.passes.stages.class_costs import ROWS
from alpa.passes.stages.class_problem import ClassSolver
from alpa.passes.stages.layer_classes import layer_classes

N = 128
NARROW = N * N * 2
"""Bytes of a parameter in bf16."""
BATCH, STATE = '{alpa.role = "batch", alpa.batch_dim = 0 : i64}', '{alpa.role = "state"'


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)


def train(params, x):
    return [w - g for w, g in zip(params, jax.grad(loss_of)(params, x), strict=True)]


def returned(params, x):
    return jax.grad(loss_of)(params, x)


def text_of(step, role: str) -> str:
    """A program of two parameters in bf16; `role` is the role of its results, {} their numbers."""
    shape = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    text = jax.jit(step).lower([shape] * 2, shape).as_text()
    tensor = f"tensor<{N}x{N}xbf16>"
    text = text.replace(f"%arg2: {tensor}", f"%arg2: {tensor} {BATCH}")
    for i in range(2):
        donated = f"{STATE}, tf.aliasing_output = {i} : i32}}" if "state" in role else STATE + "}"
        text = text.replace(f"%arg{i}: {tensor}", f"%arg{i}: {tensor} {donated}")
        result = f'{tensor} {{jax.result_info = "result[{i}]"'
        text = text.replace(result, f'{result}, alpa.result = "{role.format(i)}"')
    return text


def planned(text: str, accumulate_dtype: str, more: str = "cluster=cpu:1x1") -> ir.Module:
    options = f"num-micro-batches=4 accumulate-dtype={accumulate_dtype} {more}"
    return alpa.passes.run(text, f"alpa{{{options}}},export-stages")


def test_fragments_hold_f32() -> None:
    text = text_of(train, "state:{}")
    wide, same = (predicted_memory(planned(text, it)) for it in ("f32", "same"))
    program = read_planned(planned(text, "f32"))
    backward, update = (
        [i for i, f in enumerate(program.fragments) if f.part == part]
        for part in ("backward", "update")
    )
    gradients = {program.values[v].dtype for v in program.totals}
    assert gradients == {"f32"}
    assert sum(wide[i].arguments - same[i].arguments for i in backward) == 2 * NARROW
    assert sum(wide[i].aliased - same[i].aliased for i in backward) == 2 * NARROW
    assert sum(wide[i].arguments - same[i].arguments for i in update) == 2 * NARROW
    # The conversion is fused with the addition, and with what the update computes.
    assert all(wide[i].temporaries == same[i].temporaries for i in (*backward, *update))


@pytest.mark.parametrize(
    ("step", "role", "gradient"), [(train, "state:{}", NARROW), (returned, "mean", 0)]
)
def test_plans_count_f32(step, role: str, gradient: int) -> None:
    """Two sums; one gradient is converted at a time, or the executor converts and adds."""
    plans = [
        Plan.read(main_function(planned(text_of(step, role), it))) for it in ("f64", "f32", "same")
    ]
    f64, f32, same = (plan.predicted_peak_bytes[0] for plan in plans if plan is not None)
    assert f32 - same == 2 * NARROW + gradient
    assert f64 - f32 == 4 * NARROW


def test_stages_are_cut_by_the_bytes_of_f32() -> None:
    states: list[float] = []
    module = alpa.passes.run(
        text_of(train, "state:{}"), "simplify-trivial-ops,layer-cluster{num-layers=1}"
    )
    for accumulate_dtype in ("f32", "same"):
        plan = Plan(num_micro_batches=4, accumulate_dtype=accumulate_dtype)
        copy = parse(str(module))
        function, cluster = main_function(copy), Cluster.parse("cpu:1x1")
        arguments, results = read_arguments(function), read_results(function)
        with copy.context, ir.Location.unknown():
            widen_accumulators(function, results, plan)
            graph = Graph.of(body(function))
            classes = layer_classes(graph, arguments, results, 1, cluster, plan)
            solver = ClassSolver(classes=classes, cluster=cluster, plan=plan)
            (costs, *_) = solver.pose(1, 1, (1,)).solve((), 1.0)
        states.append(float(costs.by_class[ROWS.index("state")].sum()))
    assert states[0] - states[1] == 2 * NARROW


def test_sums_are_reduced_in_f32_once() -> None:
    """Data-parallel devices add up on their own; the update reduces the total unchanged."""
    module = planned(text_of(train, "state:{}"), "f32", "cluster=cpu:1x4 intra=data-parallel")
    program = read_planned(module)
    found = {
        fragment.part: [c for c in collectives if c.bytes >= NARROW]
        for fragment, collectives in zip(
            program.fragments, predicted_collectives(module), strict=True
        )
    }
    assert not found["backward"]
    assert {c.bytes for c in found["update"]} == {2 * NARROW}


TIED = """
!x = tensor<64x32xbf16>
!w = tensor<32x32xbf16>
func.func public @main(%w: !w {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!x {alpa.result = "concat:0"}, !w {alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %6 = stablehlo.cosine %a : !x
    mpmd.return %5, %6 : !w, !x
  } : (!x, !x) -> (!w, !x)
  %3 = mpmd.named_computation<"layer_0"(1)> (%2#1, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %5 : !w
  } : (!x, !x) -> !w
  %4 = mpmd.named_computation<"update_0"> (%w, %3, %2#0) (%a: !w, %b: !w, %c: !w) {
    %5 = stablehlo.add %b, %c : !w
    %6 = stablehlo.subtract %a, %5 : !w
    mpmd.return %6 : !w
  } : (!w, !w, !w) -> !w
  return %1, %4 : !x, !w
}
"""


@pytest.mark.parametrize(("accumulate_dtype", "size"), [("f32", 4), ("same", 2)])
def test_totals_cross_meshes_unchanged(accumulate_dtype: str, size: int) -> None:
    module = alpa.passes.run(
        TIED,
        "stage-mesh-partition{cluster=cpu:1x2 num-stages=2 mesh-shape=1 num-micro-batches=4 "
        f"accumulate-dtype={accumulate_dtype}}},place-gradient-reductions,ilp-shard-annotate,insert-cross-mesh-reshard",
    )
    crossing = [
        (MeshTensor.from_type(op.results[0].type).type, Reshard.read(op))
        for op in body(main_function(module)).operations
        if isinstance(op, mpmd.TransferOp)
    ]
    sizes = [
        reshard.fast_bytes + reshard.slow_bytes
        for type_, reshard in crossing
        if reshard is not None and list(type_.shape) == [32, 32]
    ]
    assert 32 * 32 * size in sizes
    elements = {str(type_.element_type) for type_, _ in crossing if list(type_.shape) == [32, 32]}
    assert ("f32" in elements) == (size == 4)
