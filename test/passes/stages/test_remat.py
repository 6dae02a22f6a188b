"""The layers that the stage search rematerialises, with and without a binding memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
from alpa.dialects import body, func, ir, main_function
from alpa.dialects.attributes import read_arguments, read_remat, read_results
from alpa.dialects.plan import Plan, read_solver_reports
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.solve.stages import placement, stage_dp
from alpa.passes.stages.boundary import Boundary, boundary_of
from alpa.passes.stages.candidates import SHARES, Candidate, stage_problem, with_shares
from alpa.passes.stages.class_problem import ClassSolver
from alpa.passes.stages.intervals import intervals
from alpa.passes.stages.layer_classes import LayerClasses, layer_classes
from alpa.passes.stages.policy import logical_shapes
from alpa.passes.stages.remat import rematerialised
from alpa.tools import zoo

NUM_LAYERS, BATCHES = 4, 4
CLUSTER = """
hosts = 1
devices_per_host = 2
[device]
name = "small"
memory = "{memory}"
peak_flops = {{ f32 = 1e12 }}
memory_bandwidth = 1e11
[intra_host]
bandwidth = 1e9
latency = 1e-6
[inter_host]
bandwidth = 1e9
latency = 1e-6
"""
STAGES = "stage-mesh-partition{{cluster={} num-micro-batches=4 schedule=1f1b remat={}{}}}"


@pytest.fixture(scope="module")
def clustered() -> str:
    """Layers with much computation inside: narrow at their ends, wide between."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for wide, narrow in params:
            x = x + jnp.sin(jnp.tanh(x @ wide)) @ narrow
        return jnp.mean(x**2)

    def step(params: list[tuple[jax.Array, jax.Array]], x: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = [(jnp.zeros((16, 256)), jnp.zeros((256, 16)))] * NUM_LAYERS
    text = jax.jit(step, donate_argnums=0).lower(shapes, jnp.zeros((256, 16))).as_text()
    text = text.replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )
    pipeline = f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    return str(alpa.passes.run(text, pipeline))


def cluster_of(tmp_path: Path, memory: str) -> str:
    path = tmp_path / f"{memory}.toml"
    path.write_text(CLUSTER.format(memory=memory))
    return str(path)


def planned(text: str, cluster: str, remat: str, options: str = "") -> tuple[Plan, list[int]]:
    """The plan, and the rematerialised layers."""
    module = alpa.passes.run(text, STAGES.format(cluster, remat, options))
    main = main_function(module)
    plan = Plan.read(main)
    assert plan is not None
    return plan, sorted(layer for op in body(main).operations for layer in read_remat(op))


def all_options(
    text: str, cluster: Cluster, plan: Plan, costed: Callable[..., list[Candidate]]
) -> tuple[list[Candidate], Boundary]:
    """Costs every submesh without rematerialisation, with it, and mixed; and transfers."""
    module = alpa.passes.run(text, "simplify-trivial-ops")
    function = main_function(module)
    arguments, results = read_arguments(function), read_results(function)
    graph = Graph.of(body(function))
    found: list[Candidate] = []
    with module.context:
        again = rematerialised(function)
        of = [
            layer_classes(g, arguments, results, NUM_LAYERS, cluster, plan)
            for g in (graph, Graph.of(body(main_function(again))))
        ]
        plain, all_ = (ClassSolver(classes=it, cluster=cluster, plan=plan) for it in of)
        for submesh in placement.submeshes(cluster.hosts, cluster.devices_per_host):
            for shape in logical_shapes(*submesh, 2):
                without = costed(plain, *submesh, [shape])
                whole = costed(all_, *submesh, [shape], 1.0)
                found += without + with_shares(without, whole)
    return found, boundary_of(graph, arguments, results, NUM_LAYERS)


def test_equal_layers_are_rematerialised_to_equal_ones() -> None:
    text = zoo.get("gpt-tiny", num_layers=4).lower(4)
    module = alpa.passes.run(text, "simplify-trivial-ops,layer-cluster{num-layers=4}")
    function = main_function(module)
    arguments, results = read_arguments(function), read_results(function)
    cluster, plan = Cluster.parse("cpu:1x4"), Plan(num_micro_batches=2)

    def classes(of: func.FuncOp, before: Sequence[int] | None = None) -> LayerClasses:
        graph = Graph.of(body(of))
        return layer_classes(graph, arguments, results, 4, cluster, plan, equal_before=before)

    with module.context:
        plain, again = classes(function), rematerialised(function)
        main = main_function(again)
        read, derived = classes(main), classes(main, plain.class_of)
        one_each = classes(main, range(4))
        copies = rematerialised(function, plain.class_of)
    assert len(set(plain.class_of)) < 4
    assert str(copies) == str(again)
    assert (derived.class_of, derived.links) == (read.class_of, read.links)
    assert str(derived.module) == str(read.module)
    assert one_each.class_of == (0, 1, 2, 3)


@pytest.mark.parametrize("memory", ["64MiB", "1200KiB", "640KiB"])
def test_costing_where_memory_binds_finds_what_costing_all_does(
    clustered: str, tmp_path: Path, memory: str, costed: Callable[..., list[Candidate]]
) -> None:
    name = cluster_of(tmp_path, memory)
    cluster = Cluster.parse(name)
    given = Plan(num_micro_batches=BATCHES, schedule="1f1b", cluster=name)
    options, boundary = all_options(clustered, cluster, given, costed)
    best = stage_dp.solve(
        stage_problem(options, [0] * len(options), boundary, [cluster], [None], given)
    )
    plan, _ = planned(clustered, name, "auto")
    assert plan.predicted_step_seconds == pytest.approx(best.objective, rel=1e-9)


def test_the_less_memory_the_more_layers(clustered: str, tmp_path: Path) -> None:
    clusters = {size: cluster_of(tmp_path, f"{size}KiB") for size in (65536, 1300, 1100, 800)}
    found = {size: planned(clustered, name, "auto") for size, name in clusters.items()}
    assert [layers for _, layers in found.values()] == [[], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    seconds = [plan.predicted_step_seconds for plan, _ in found.values()]
    assert seconds == sorted(seconds)
    for size, (plan, _) in found.items():
        assert max(plan.predicted_peak_bytes) <= size * 1024
    free, _ = planned(clustered, clusters[65536], "none")
    assert free.predicted_step_seconds == seconds[0]
    with pytest.raises(ir.MLIRError, match="no cut of 4 layers fits into memory"):
        planned(clustered, clusters[1300], "none")


def test_the_shardings_fit_as_well(clustered: str, tmp_path: Path) -> None:
    stages = STAGES.format(cluster_of(tmp_path, "1200KiB"), "auto", " num-stages=1")
    module = alpa.passes.run(clustered, f"{stages},place-gradient-reductions,ilp-shard-annotate")
    (report,) = read_solver_reports(main_function(module))
    assert report.peak_bytes <= 1200 * 1024


def option(seconds: np.ndarray, held: np.ndarray, transient: np.ndarray) -> Candidate:
    """The costs of single layers, added up over intervals."""
    count = len(transient)
    largest = np.array(
        [[transient[i : j + 1].max(initial=0.0) for j in range(count)] for i in range(count)]
    )
    return Candidate(
        submesh=(1, 2, (2,)),
        seconds=intervals(seconds),
        forward=intervals(seconds / 4),
        second=intervals(seconds / 2),
        update=intervals(2 * seconds),
        state_bytes=intervals(3 * held),
        transient_bytes=largest,
        activation_bytes=intervals(held),
        exchanged_bytes=intervals(5 * held),
        freed_bytes=intervals(held / 2),
        made_bytes=intervals(2 * held),
    )


def test_a_share_of_the_layers_costs_what_they_do() -> None:
    rng = np.random.default_rng(0)
    plain, again = (tuple(rng.random((3, 9))) for _ in range(2))
    options = with_shares([option(*plain)], [replace(option(*again), remat=1.0)])
    assert [one.remat for one in options] == [*SHARES, 1.0]
    for one in options:
        for i, j in zip(*np.triu_indices(9), strict=True):
            mine = one.rematerialised(int(i), int(j))
            assert len(mine) == ceil(one.remat * (j + 1 - i))
            seconds, held, transient = np.array(
                [
                    [(again if layer in mine else plain)[k][layer] for layer in range(i, j + 1)]
                    for k in range(3)
                ]
            )
            assert one.seconds[i, j] == pytest.approx(seconds.sum())
            assert one.update[i, j] == pytest.approx(2 * seconds.sum())
            fixed = one.fixed_bytes[i, j] - one.exchanged_bytes[i, j]
            assert fixed == pytest.approx(3 * held.sum() + transient.max())
            assert one.activation_bytes[i, j] == pytest.approx(held.sum())
            parts = np.array([1, 1, 2]) / 4 * seconds.sum()
            assert one.seconds_of(int(i), int(j)) == pytest.approx(
                parts if i else (parts[0], 0.0, parts[1] + parts[2])
            )
            bytes_of = one.split_bytes.at(int(i), int(j))
            assert bytes_of == pytest.approx(
                held.sum() * np.array([0.5, 0.5, 2.0] if i else [0.0, 1.0, 0.0])
            )
