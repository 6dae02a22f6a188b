"""`stage-mesh-partition` on training steps: the stages together compute what the program did."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa.passes
from alpa.dialects import body, func, ir, main_function, mpmd, parse, terminator
from alpa.dialects.attributes import read_arguments, read_part, read_remat, read_results
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.analysis.graph import replace_operands
from alpa.passes.stages.policy import OVER_HOSTS
from alpa.runtime.reference import compare, random_arguments, run_unplanned

CLUSTERED = "simplify-trivial-ops,layer-cluster{num-layers=3}"


def tied_loss(params: Any, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["in"])
    h = jnp.tanh(h @ params["middle"] + params["bias"])
    return jnp.mean((h @ params["in"].T - x) ** 2)


def step_text(optimizer: optax.GradientTransformation) -> str:
    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(tied_loss)(state[0], x)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        new = (optax.apply_updates(state[0], updates), opt_state)
        return new, loss, optax.tree.norm(grads)

    shapes = {"in": (8, 16), "middle": (16, 16), "bias": (16,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    state = (params, optimizer.init(params))
    jitted = jax.jit(step, donate_argnums=0, keep_unused=True)
    return jitted.lower(state, jnp.ones((4, 8))).as_text()


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "clip and momentum": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)
    ),
}


def joined(planned: ir.Module) -> ir.Module:
    """Fragments inlined, transfers removed, mesh tensors turned into tensors."""
    main = main_function(planned)
    with planned.context, ir.Location.unknown():
        plain = ir.Module.create()
        inner_types = {}
        for op in body(main).operations:
            if isinstance(op, mpmd.FragmentOp):
                inside = body(op)
                pairs = [*zip(op.operands, inside.arguments, strict=True)]
                pairs += zip(op.results, terminator(inside).operands, strict=True)
                inner_types.update((outer.type, value.type) for outer, value in pairs)
        results = [inner_types[v.type] for v in terminator(body(main)).operands]
        inputs = [inner_types[v.type] for v in body(main).arguments]
        with ir.InsertionPoint(plain.body):
            new = func.FuncOp("main", (inputs, results), visibility="public")
        block = new.add_entry_block()
        values = dict(zip(body(main).arguments, block.arguments, strict=True))
        for op in list(body(main).operations)[:-1]:
            if isinstance(op, mpmd.TransferOp):
                values[op.result] = values[op.operands[0]]
                continue
            inside = body(op)
            mapping = {a: values[v] for a, v in zip(inside.arguments, op.operands, strict=True)}
            for member in list(inside.operations)[:-1]:
                clone = member.operation.clone(ip=ir.InsertionPoint(block)).opview
                replace_operands(clone, mapping)
                mapping.update(zip(member.results, clone.results, strict=True))
            returned = terminator(inside).operands
            values.update(zip(op.results, (mapping[v] for v in returned), strict=True))
        with ir.InsertionPoint(block):
            func.ReturnOp([values[v] for v in terminator(body(main)).operands])
    return plain


@pytest.mark.parametrize(
    ("cluster", "remat"), [("cpu:1x2", "none"), ("cpu:2x4", "none"), ("cpu:1x2", "layer")]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_stages_compute_the_step(name: str, cluster: str, remat: str) -> None:
    text = step_text(OPTIMIZERS[name]())
    program = parse(text)
    arguments = random_arguments(program, 0)
    expected = run_unplanned(program, arguments)
    stages = f"stage-mesh-partition{{cluster={cluster} num-stages=2 remat={remat}}}"
    planned = alpa.passes.run(text, f"{CLUSTERED},{stages}")
    main = main_function(planned)
    again = [layer for op in body(main).operations for layer in read_remat(op)]
    # The next layers read the first ones' results, so these are kept.
    assert again == ([2] if remat == "layer" else [])
    inputs = [argument.input for argument in read_arguments(main)]
    outputs = [result.output for result in read_results(main)]
    assert len(read_meshes(main)) == 2
    assert sorted(set(inputs)) == list(range(len(arguments)))
    assert sorted(set(outputs)) == list(range(len(expected)))
    found = run_unplanned(joined(planned), [arguments[i] for i in inputs])
    assert all(row.ok for row in compare(found, [expected[r] for r in outputs]))


def random_layer(seed: int) -> str:
    """A forward and a backward part of random element-wise ops; others read some of the results."""
    rng = np.random.default_rng(seed)
    type_ = "tensor<4xf32>"

    def ops(values: list[str], count: int, prefix: str) -> list[str]:
        lines: list[str] = []
        for n in range(count):
            a, b = rng.choice(values, 2)
            kind = rng.choice(["add", "multiply", "tanh", "sine"])
            operands = a if kind in ("tanh", "sine") else f"{a}, {b}"
            values.append(f"%{prefix}{n}")
            lines.append(f"%{prefix}{n} = stablehlo.{kind} {operands} : {type_}")
        return lines

    forward, backward = ["%a", "%b"], [f"%r{i}" for i in range(4)] + ["%e"]
    forward_ops, backward_ops = ops(forward, 8, "f"), ops(backward, 6, "g")
    results = list(rng.choice(forward, 4))  # the same value twice, or an operand, is possible
    shared = sorted({0, *(int(i) for i in rng.choice(4, 2))})
    return f"""
func.func public @main(%x: {type_}, %y: {type_}) -> ({", ".join([type_] * (len(shared) + 2))}) {{
  %0:4 = mpmd.named_computation<"layer_0"(0)> (%x, %y) (%a: {type_}, %b: {type_}) {{
    {chr(10).join(forward_ops)}
    mpmd.return {", ".join(results)} : {", ".join([type_] * 4)}
  }} : ({type_}, {type_}) -> ({", ".join([type_] * 4)})
  %1:2 = mpmd.named_computation<"layer_0"(1)> (%0#0, %0#1, %0#2, %0#3, %y)
      ({", ".join(f"{v}: {type_}" for v in backward[:5])}) {{
    {chr(10).join(backward_ops)}
    mpmd.return {backward[-1]}, {backward[-2]} : {type_}, {type_}
  }} : ({", ".join([type_] * 5)}) -> ({type_}, {type_})
  return {", ".join(f"%0#{i}" for i in shared)}, %1#0, %1#1
    : {", ".join([type_] * (len(shared) + 2))}
}}"""


@pytest.mark.parametrize("seed", range(8))
def test_rematerialised_random_layers_compute_the_same(seed: int) -> None:
    text = random_layer(seed)
    planned = {
        remat: alpa.passes.run(text, f"stage-mesh-partition{{cluster=cpu:1x1 remat={remat}}}")
        for remat in ("none", "layer")
    }
    arguments = random_arguments(joined(planned["none"]), seed)
    expected, found = (run_unplanned(joined(module), arguments) for module in planned.values())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    # The backward part reads arguments, and values that the program returns anyway.
    main = main_function(planned["layer"])
    forward, backward = list(body(main).operations)[:2]
    returned = list(terminator(body(main)).operands)
    assert all(v in (*body(main).arguments, *returned) for v in backward.operands)
    assert all(v in returned for v in forward.results)


def test_each_mesh_donates_a_state_to_its_own_result() -> None:
    text = step_text(optax.sgd(0.1))
    planned = alpa.passes.run(
        text, f"{CLUSTERED},stage-mesh-partition{{cluster=cpu:1x2 num-stages=2}}"
    )
    main = main_function(planned)
    targets = list(main.type.results)
    results = read_results(main)
    states = [
        (a, t)
        for a, t in zip(read_arguments(main), main.type.inputs, strict=True)
        if a.role == "state"
    ]
    assert len(states) == 4  # the tied parameter on both meshes
    for argument, type_ in states:
        assert argument.aliasing_output is not None
        assert targets[argument.aliasing_output] == type_
        assert results[argument.aliasing_output].output == argument.input


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("", "no cluster to plan for; name one with the option cluster"),
        ("tpu:1x2", "unknown cluster 'tpu': did you mean cpu"),
        (
            "cpu:1x1",
            "cannot make 2 stages of 3 layer(s) on 1 device(s); num-stages can be at most 1",
        ),
    ],
)
def test_a_cluster_that_does_not_do(cluster: str, message: str) -> None:
    with pytest.raises(ir.MLIRError, match=re.escape(message)):
        alpa.passes.run(
            step_text(optax.sgd(0.1)),
            f"{CLUSTERED},stage-mesh-partition{{cluster={cluster} num-stages=2}}",
        )


def test_more_micro_batches_in_flight_need_more_memory() -> None:
    def peaks(schedule: str, batches: int) -> np.ndarray:
        two_layers = CLUSTERED.replace("=3", "=2")  # so that the cut is always the same
        options = f"cluster=cpu:1x2 num-stages=2 schedule={schedule} num-micro-batches={batches}"
        text = step_text(optax.sgd(0.1)).replace(
            "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
        )
        planned = alpa.passes.run(text, f"{two_layers},stage-mesh-partition{{{options}}}")
        plan = Plan.read(main_function(planned))
        assert plan is not None
        inputs = 4 * 8 * 4 * batches  # both stages read the batch
        return np.array(plan.predicted_peak_bytes) - inputs

    one, two = peaks("gpipe", 1), peaks("gpipe", 2)
    eight, eight_1f1b = peaks("gpipe", 8), peaks("1f1b", 8)
    assert (eight > eight_1f1b).all()
    assert eight_1f1b[0] == two[0]  # the first of two stages keeps two micro-batches
    assert one[1] < eight_1f1b[1] < two[1]  # the last keeps one, and accumulates gradients


def test_throughput_makes_more_stages_than_the_step_objective() -> None:
    """Nothing can be split here: a mesh of two is as slow as one device, but needs no transfer."""

    def forward(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    text = jax.jit(forward).lower([jnp.ones((509, 509))] * 4, jnp.ones((7, 509))).as_text()
    stages = {}
    for objective in ("step", "throughput"):
        options = f"cluster=cpu:1x2 objective={objective}"
        four_layers = CLUSTERED.replace("=3", "=4")
        planned = alpa.passes.run(text, f"{four_layers},stage-mesh-partition{{{options}}}")
        stages[objective] = len(read_meshes(main_function(planned)))
    assert stages == {"step": 1, "throughput": 2}


def test_throughput_is_for_forwards_only() -> None:
    message = "objective=throughput is for programs of forwards only, and this is the backward part"
    with pytest.raises(ir.MLIRError, match=message):
        meshes("cluster=cpu:1x2 objective=throughput")


def meshes(options: str, *, layers: int = 3) -> list[tuple[tuple[int, ...], int]]:
    """The logical shape and the number of layers of each stage."""
    clustered = CLUSTERED.replace("=3", f"={layers}")
    planned = alpa.passes.run(
        step_text(optax.sgd(0.1)), f"{clustered},stage-mesh-partition{{{options}}}"
    )
    main = main_function(planned)
    counts = [
        len(ir.ArrayAttr(op.attributes["origin"]))
        for op in body(main).operations
        if isinstance(op, mpmd.FragmentOp) and read_part(op) == "forward"
    ]
    return list(zip([mesh.logical_shape for mesh in read_meshes(main)], counts, strict=True))


def test_equal_layers_share_the_devices_equally() -> None:
    found = meshes("cluster=cpu:2x2 equal-layers=true num-stages=2")
    assert sorted(layers for _, layers in found) == [1, 2]
    assert [shape for shape, _ in found] == [(2,), (2,)]


def test_a_mesh_shape_decides_the_number_of_stages() -> None:
    assert [shape for shape, _ in meshes("cluster=cpu:2x4 mesh-shape=2x2")] == [(2, 2), (2, 2)]
    assert [shape for shape, _ in meshes("cluster=cpu:2x2 mesh-shape=4x1")] == [(4, 1)]
    found = meshes("cluster=cpu:1x2 mesh-shape=1 equal-layers=true", layers=2)
    assert found == [((1,), 1), ((1,), 1)]


def test_many_hosts_without_meshes_over_them() -> None:
    one_each = "meshes-over-hosts=false num-stages=10"
    assert [shape for shape, _ in meshes(f"cluster=cpu:10x2 {one_each}", layers=10)] == [(2,)] * 10


@pytest.mark.parametrize(
    ("options", "loses"),
    [
        ("cluster=cpu:2x2", True),
        ("cluster=cpu:2x2 num-stages=2", False),  # A mesh over both hosts leaves no device.
        ("cluster=cpu:3x2 num-stages=3", True),  # 4, 1 and 1 devices
        ("cluster=cpu:2x2 mesh-shape=2", False),
        ("cluster=cpu:1x4", False),
        ("cluster=cpu:1x2+cpu:1x4", False),
        ("cluster=cpu:2x2 num-stages=2 meshes-over-hosts=true", False),
    ],
)
def test_meshes_over_hosts_are_only_left_out_if_there_is_room(options: str, loses: bool) -> None:
    off = "" if "over-hosts" in options else " meshes-over-hosts=false"
    pipeline = f"{CLUSTERED},stage-mesh-partition{{{options}{off}}}"
    planned = alpa.passes.run(step_text(optax.sgd(0.1)), pipeline)
    plan = Plan.read(main_function(planned))
    assert plan is not None
    assert [one.what for one in plan.dropped] == [OVER_HOSTS] * loses


def test_hosts_of_several_kinds_without_meshes_over_them() -> None:
    hosts = meshes("cluster=cpu:2x2+cpu:2x4 meshes-over-hosts=false", layers=6)
    assert all(np.prod(shape) <= 4 for shape, _ in hosts)


def test_hosts_of_six_devices() -> None:
    found = meshes("cluster=cpu:1x6 num-stages=3 mesh-shape=2")
    assert [shape for shape, _ in found] == [(2,)] * 3
    found = meshes("cluster=cpu:1x6 num-stages=3 fixed-stages=0-0:1x1,1-1:1x3")
    assert [shape for shape, _ in found] == [(1,), (3,), (2,)]
    found = meshes("cluster=cpu:1x6 num-stages=2")
    assert [shape for shape, _ in found] == [(2,), (2, 2)]
    found = meshes("cluster=cpu:1x6 num-stages=2 equal-layers=true")
    assert [shape for shape, _ in found] == [(3,)] * 2
    found = meshes("cluster=cpu:2x6 mesh-shape=3", layers=4)
    assert [shape for shape, _ in found] == [(3,)] * 4
    assert [shape for shape, _ in meshes("cluster=cpu:2x6 mesh-shape=3x2")] == [(3, 2), (3, 2)]


def test_stages_of_a_single_host_have_any_number_of_its_devices() -> None:
    found = meshes("cluster=cpu:1x3 num-stages=2")
    assert sorted(shape for shape, _ in found) == [(1,), (2,)]
    found = meshes("cluster=cpu:1x7+cpu:1x4 num-stages=3 fixed-stages=1-1:1x5,2-2:1x2")
    assert [np.prod(shape) for shape, _ in found] == [4, 5, 2]
    message = "mesh-shape 2x2 has 4 devices; equal submeshes of 1x6 have 1, 2, 3, 6"
    with pytest.raises(ir.MLIRError, match=message):
        meshes("cluster=cpu:1x6 mesh-shape=2x2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mesh-shape=2x3", "mesh-shape 2x3 has 6 devices; equal submeshes of 2x4 have 1, 2, 4, 8"),
        ("mesh-shape=2x", "option 'mesh-shape' is '2x'; expected auto or the sizes of one to four"),
        (
            "mesh-shape=4 num-stages=3",
            "3 layers cannot be cut in 3 stages so that submeshes of 1x4 use all 8 devices",
        ),
        (
            "equal-layers=true num-stages=3",
            "no 3 stages of equally many layers: no number of stages up to 3, the layers, cuts 2x4 "
            "devices into equal submeshes of 1x1, 1x2, 1x4, 2x4",
        ),
        (
            "meshes-over-hosts=false mesh-shape=2x4",
            "meshes-over-hosts=false keeps each mesh inside one host, and mesh-shape 2x4 has 8 "
            "devices; a host has 4, so give a shape of so many devices at most",
        ),
        (
            "meshes-over-hosts=false num-stages=1",
            "so 2 hosts need at least 2 stages, and num-stages is 1; leave num-stages out, or plan "
            "for a cluster of at most 1 host(s)",
        ),
        (
            "meshes-over-hosts=false meshes=0-7:8",
            "and the given mesh @mesh_0 spans 2 hosts; plan for a cluster of one host",
        ),
    ],
)
def test_shapes_that_do_not_do(options: str, message: str) -> None:
    with pytest.raises(ir.MLIRError, match=re.escape(message)):
        meshes(f"cluster=cpu:2x4 {options}")
