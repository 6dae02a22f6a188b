"""`layer-cluster` on whole training steps: the numbers stay the same.

A clustered step runs as in the runtime: forward and backward once per micro-batch, values that flow
from backward to update averaged, then the update once. The results are compared with plain JAX at
the full batch, so an op in the wrong part shows as a wrong number. The pass itself checks the flow
of values (see `verify-layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

import alpa.passes
from alpa.dialects import body, func, ir, main_function, mpmd, parse, separate, terminator, walk
from alpa.dialects.attributes import read_arguments, read_results
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph, replace_operands
from alpa.passes.layer_cluster import LayerCluster
from alpa.passes.simplify_trivial_ops import SimplifyTrivialOps
from alpa.runtime.pjrt import compile_module
from alpa.runtime.reference import compare
from test.residual_blocks import train, weights

PIPELINES = (
    "simplify-trivial-ops,layer-cluster{num-layers=3}",
    "simplify-trivial-ops,func.func(canonicalize,cse),layer-cluster{num-layers=3}",
)


# -- programs ------------------------------------------------------------------------------------


Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Program:
    """A step `(state, batch) -> (state, metrics)`; `batch` takes the number of samples.

    `by_halves` runs the two halves of the batch in turn, for steps where that changes the numbers.
    """

    step: Step
    state: Any
    batch: Callable[[int], Any]
    by_halves: Step | None = None


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def trained(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Callable[[int], Any],
    optimizer: optax.GradientTransformation | None = None,
) -> Program:
    optimizer = optimizer or optax.sgd(0.1)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Program(step, (params, optimizer.init(params)), batch)


def mlp_params(layers: int = 4, width: int = 8) -> Any:
    return [{"w": random(i, width, width), "b": random(100 + i, width)} for i in range(layers)]


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def regression(samples: int) -> Any:
    return random(7, samples, 8), random(8, samples, 8)


def squared_error(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((mlp(params, x) - y) ** 2)


def with_optimizer(optimizer: optax.GradientTransformation) -> Callable[[], Program]:
    return lambda: trained(squared_error, mlp_params(), regression, optimizer)


def adamw_clip_schedule() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 20)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule, weight_decay=0.1))


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), axis=-1)
    return x + jnp.einsum("bhst,bthe,hed->bsd", weights, v, p["o"])


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p["scale"] + p["shift"]


def block(p: Any, x: jax.Array) -> jax.Array:
    x = attention(p, layer_norm(p["norm"], x))
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def block_params(seed: int) -> Any:
    shapes = {"q": (8, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4), "o": (2, 4, 8)}
    shapes |= {"up": (8, 16), "down": (16, 8)}
    norm = {"scale": jnp.ones(8), "shift": jnp.zeros(8)}
    return {"norm": norm} | {
        name: random(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())
    }


def tokens(samples: int) -> Any:
    return jnp.asarray(np.random.default_rng(3).integers(0, 12, (samples, 6)), jnp.int32)


def language_params(layers: int = 2) -> Any:
    return {"embedding": random(1, 12, 8), "blocks": [block_params(10 * i) for i in range(layers)]}


def language_loss(
    params: Any, tokens: jax.Array, wrap: Callable[[Any], Any] = lambda f: f
) -> jax.Array:
    """A decoder whose head is its embedding."""
    x = params["embedding"][tokens[:, :-1]]
    for p in params["blocks"]:
        x = wrap(block)(p, x)
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tied() -> Program:
    return trained(language_loss, language_params(), tokens, optax.adam(1e-2))


def remat_mlp() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for layer in params:
            x = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]))(layer, x)
        return jnp.mean((x - y) ** 2)

    return trained(loss, mlp_params(), regression, optax.adam(1e-2))


def remat_language() -> Program:
    return trained(
        lambda p, t: language_loss(p, t, jax.checkpoint),
        language_params(),
        tokens,
        optax.adam(1e-2),
    )


def scanned() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = jnp.tanh(x @ params["in"])
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["middle"])
        return jnp.mean((x @ params["out"] - y) ** 2)

    params = {"in": random(1, 8, 8), "middle": random(2, 4, 8, 8), "out": random(3, 8, 8)}
    return trained(loss, params, regression, optax.adam(1e-2))


def images(samples: int) -> Any:
    return random(1, samples, 6, 6, 4), random(2, samples, 8)


def convolutions() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for w in params["kernels"]:
            x = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((x.mean((1, 2)) @ params["head"] - y) ** 2)

    params = {"kernels": [random(i, 3, 3, 4, 4) for i in range(3)], "head": random(9, 4, 8)}
    return trained(loss, params, images, optax.sgd(0.1, momentum=0.9))


def auxiliary_loss() -> Program:
    """The step returns the sum, both losses and an accuracy."""
    optimizer = optax.adam(1e-2)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        hidden = mlp(params[:2], x)
        out = mlp(params[2:], hidden)
        main, aux = jnp.mean((out - y) ** 2), 0.1 * jnp.mean(hidden**4)
        accuracy = jnp.mean((out > 0) == (y > 0))
        return main + aux, {"main": main, "aux": aux, "accuracy": accuracy}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss} | metrics

    params = mlp_params()
    return Program(step, (params, optimizer.init(params)), regression)


def no_loss() -> Program:
    program = trained(squared_error, mlp_params(), regression, optax.adam(1e-2))
    return Program(lambda s, b: (program.step(s, b)[0], ()), program.state, regression)


def norm_metrics() -> Program:
    """Norms of gradients, updates and parameters beside the loss, and the learning rate."""
    schedule = optax.linear_schedule(0.1, 0.01, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(schedule))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, count = state
        loss, grads = jax.value_and_grad(squared_error)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(count),
            "loss": loss,
            "param_norm": optax.tree.norm(params),
            "update_norm": optax.tree.norm(updates),
        }
        return (optax.apply_updates(params, updates), opt_state, count + 1), metrics

    params = mlp_params()
    return Program(step, (params, optimizer.init(params), jnp.zeros((), jnp.int32)), regression)


def running_average() -> Program:
    """Batch normalisation: the forward part writes means and variances."""
    optimizer = optax.sgd(0.1)

    def loss_fn(params: Any, averages: Any, batch: Any) -> Any:
        x, y = batch
        new = []
        for layer, old in zip(params, averages, strict=True):
            x = x @ layer["w"]
            mean, variance = x.mean(0), x.var(0)
            new.append((0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * variance))
            x = jnp.tanh((x - mean) * jax.lax.rsqrt(variance + 1e-3) + layer["b"])
        return jnp.mean((x - y) ** 2), new

    def step_on(state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
        params, averages, opt_state = state
        losses, gradients = [], []
        for batch in batches:
            grad = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, averages), grads = grad(params, averages, batch)
            losses.append(loss)
            gradients.append(grads)
        mean = jax.tree.map(lambda *items: sum(items) / len(items), *gradients)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return (optax.apply_updates(params, updates), averages, opt_state), sum(losses) / len(
            losses
        )

    params = mlp_params()
    averages = [(jnp.zeros(8), jnp.ones(8)) for _ in params]
    return Program(
        lambda state, batch: step_on(state, [batch]),
        (params, averages, optimizer.init(params)),
        regression,
        by_halves=lambda state, batch: step_on(state, halves(batch)),
    )


def halves(batch: Any) -> list[Any]:
    return [jax.tree.map(lambda x, i=i: jnp.split(x, 2)[i], batch) for i in range(2)]


def moving_average_of_parameters() -> Program:
    inner = trained(squared_error, mlp_params(), regression, optax.adam(1e-2))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        (params, opt_state), loss = inner.step(state[0], batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state[1], params)
        return ((params, opt_state), average), loss

    return Program(step, (inner.state, mlp_params()), regression)


def mixed_precision() -> Program:
    """Parameters are f32, the passes bf16."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = mlp(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))
        return jnp.mean((x.astype(jnp.float32) - y) ** 2)

    return trained(loss, mlp_params(), regression, optax.sgd(0.1))


def frozen_layer() -> Program:
    """Layer 1 is returned, but does not learn."""

    def loss(params: Any, batch: Any) -> jax.Array:
        params = [params[0], jax.lax.stop_gradient(params[1]), *params[2:]]
        return squared_error(params, batch)

    return trained(loss, mlp_params(), regression, optax.sgd(0.1))


def l2_in_the_loss() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return squared_error(params, batch) + 1e-2 * penalty

    return trained(loss, mlp_params(), regression, optax.adam(1e-2))


def shared_layer() -> Program:
    """One layer runs three times, with others between."""

    def loss(params: Any, batch: Any) -> jax.Array:
        first, second = params
        x, y = batch
        return jnp.mean((mlp([first, second, first, second, first], x) - y) ** 2)

    return trained(loss, mlp_params(2), regression, optax.adam(1e-2))


def long_skip() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        early = mlp(params[:1], x)
        middle = mlp(params[1:3], early)
        return jnp.mean((mlp(params[3:], middle + early * jnp.cos(x)) - y) ** 2)

    return trained(loss, mlp_params(), regression, optax.adam(1e-2))


def clipped_without_a_loss() -> Program:
    program = trained(squared_error, mlp_params(), regression, adamw_clip_schedule())
    return Program(lambda s, b: (program.step(s, b)[0], ()), program.state, regression)


def recomputed_without_barriers() -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for layer in params:
            f = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), prevent_cse=False)
            x = f(layer, x)
        return jnp.mean((x - y) ** 2)

    return trained(loss, mlp_params(), regression, optax.adam(1e-2))


def whole_loss_recomputed() -> Program:
    return trained(jax.checkpoint(squared_error), mlp_params(), regression, optax.adam(1e-2))


def dots_saved() -> Program:
    policy = jax.checkpoint_policies.dots_saveable
    return trained(
        lambda p, t: language_loss(p, t, lambda f: jax.checkpoint(f, policy=policy)),
        language_params(),
        tokens,
        optax.sgd(0.1),
    )


def weight_normalisation() -> Program:
    """A parameter is divided by its own norm."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for layer in params:
            norm = jnp.sqrt(jnp.sum(layer["w"] ** 2, axis=0))
            x = jnp.tanh(x @ (layer["w"] / norm) * layer["b"])
        return jnp.mean((x - y) ** 2)

    return trained(loss, mlp_params(), regression, optax.sgd(0.1))


def spectral_normalisation(norms: Callable[[Any, Any], Any]) -> Callable[[], Program]:
    """Parameters are divided by norms, which are estimated from vectors in the state.

    `norms` returns a new vector and a norm, which depend on no sample. The step returns both.
    """

    def loss_fn(params: Any, vectors: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, y = batch
        found = []
        for layer, vector in zip(params, vectors, strict=True):
            found.append(norms(layer["w"], vector))
            x = jnp.tanh(x @ (layer["w"] / found[-1][1]) + layer["b"])
        return jnp.mean((x - y) ** 2), found

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, vectors = state
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, found), grads = grad(params, vectors, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return (params, [vector for vector, _ in found]), (loss, [norm for _, norm in found])

    params = mlp_params()
    vectors = [jnp.linspace(1, 2, 8) for _ in params]
    return lambda: Program(step, (params, vectors), regression)


def power_iteration(w: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A norm that is computed from the new vector."""
    v = u @ w.T
    v = v / jnp.linalg.norm(v)
    u = v @ w
    u, v = jax.lax.stop_gradient((u / jnp.linalg.norm(u), v))
    return u, v @ w @ u


def power_iteration_unless_zero(w: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A branch returns the new vector and the norm."""
    zero = jnp.all(w == 0)
    return jax.lax.cond(zero, lambda: (u, jnp.ones(())), lambda: power_iteration(w, u))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "sgd": with_optimizer(optax.sgd(0.1)),
    "momentum": with_optimizer(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adam": with_optimizer(optax.adam(1e-2)),
    "adamw-clip-schedule": with_optimizer(adamw_clip_schedule()),
    "lion": with_optimizer(optax.lion(1e-2)),
    "lamb": with_optimizer(optax.lamb(1e-2)),
    "muon": with_optimizer(optax.contrib.muon(1e-2)),
    "adafactor": with_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "tied": tied,
    "remat-mlp": remat_mlp,
    "remat-language": remat_language,
    "recomputed-without-barriers": recomputed_without_barriers,
    "whole-loss-recomputed": whole_loss_recomputed,
    "dots-saved": dots_saved,
    "scan": scanned,
    "convolutions": convolutions,
    "auxiliary-loss": auxiliary_loss,
    "no-loss": no_loss,
    "clipped-without-a-loss": clipped_without_a_loss,
    "norm-metrics": norm_metrics,
    "running-average": running_average,
    "moving-average-of-parameters": moving_average_of_parameters,
    "mixed-precision": mixed_precision,
    "frozen-layer": frozen_layer,
    "l2-in-the-loss": l2_in_the_loss,
    "shared-layer": shared_layer,
    "long-skip": long_skip,
    "weight-normalisation": weight_normalisation,
    "spectral-normalisation": spectral_normalisation(power_iteration),
    "spectral-normalisation-in-a-branch": spectral_normalisation(power_iteration_unless_zero),
}


# -- a clustered step as data flow ---------------------------------------------------------------


@dataclass(frozen=True)
class Clustered:
    """A clustered module: its graph of named computations, and the part and layer of each."""

    module: ir.Module
    graph: Graph
    origins: list[Origin]

    @classmethod
    def of(cls, module: ir.Module) -> Clustered:
        graph = Graph.of(body(main_function(module)))
        for op in graph.ops:
            assert isinstance(op, mpmd.NamedComputationOp), op.name
        return cls(module, graph, [Origin.of(op) for op in graph.ops])

    def part(self, value: int) -> str:
        """The part that computes a value; "" for an argument."""
        producer = self.graph.producer[value]
        return "" if producer < 0 else part_of(self.origins[producer])


def part_of(origin: Origin) -> str:
    if origin.name.startswith("update_"):
        return "update"
    return "backward" if origin.transpose_count else "forward"


def lowered(program: Program, samples: int, donate: bool = True) -> str:
    step = jax.jit(program.step, donate_argnums=(0,) if donate else (), keep_unused=True)
    return step.lower(program.state, program.batch(samples)).as_text()


def clustered_step(program: Program, samples: int, pipeline: str = PIPELINES[0]) -> Clustered:
    return Clustered.of(alpa.passes.run(lowered(program, samples), pipeline))


# -- running it ----------------------------------------------------------------------------------


Arrays = list[np.ndarray]


def executable(clustered: Clustered, ops: list[int], inputs: list[int], outputs: list[int]):
    """The named computations `ops`, inlined into a plain module and compiled for one device."""
    graph = clustered.graph
    with clustered.module.context, ir.Location.unknown():
        plain = ir.Module.create()
        types = [[graph.values[v].type for v in values] for values in (inputs, outputs)]
        with ir.InsertionPoint(plain.body):
            main = func.FuncOp("main", (types[0], types[1]), visibility="public")
        block = main.add_entry_block()
        outer = {graph.values[v]: b for v, b in zip(inputs, block.arguments, strict=True)}
        for op in (graph.ops[o] for o in ops):
            inner = body(op)
            mapping = {a: outer[v] for a, v in zip(inner.arguments, op.operands, strict=True)}
            for member in list(inner.operations)[:-1]:
                clone = member.operation.clone(ip=ir.InsertionPoint(block)).opview
                replace_operands(clone, mapping)
                mapping.update(zip(member.results, clone.results, strict=True))
            returned = terminator(inner).operands
            outer.update(zip(op.results, (mapping[v] for v in returned), strict=True))
        with ir.InsertionPoint(block):
            func.ReturnOp([outer[graph.values[v]] for v in outputs])
    plain = separate(plain.operation)
    device = jax.devices()[0]
    sharding = SingleDeviceSharding(device)
    shapes = [tuple(ir.RankedTensorType(type_).shape) for type_ in types[1]]
    compiled = compile_module(plain, [device], [(shape, sharding) for shape in shapes])

    def run(arrays: Sequence[np.ndarray]) -> Arrays:
        on_device = [jax.device_put(array, device) for array in arrays]
        return [np.asarray(array) for array in compiled(on_device)]

    return run


def run_step(clustered: Clustered, arguments: Arrays, num_micro_batches: int) -> Arrays:
    """One step as in design.md, section 1, "Training steps"."""
    graph = clustered.graph
    roles = read_arguments(main_function(clustered.module))
    results = [result.role for result in read_results(main_function(clustered.module))]
    micro = [o for o, origin in enumerate(clustered.origins) if part_of(origin) != "update"]
    updates = [o for o, origin in enumerate(clustered.origins) if part_of(origin) == "update"]
    micro_made = {v for o in micro for v in graph.results[o]}
    wanted = {v for o in updates for v in graph.operands[o]} | set(graph.returned)
    crossing = sorted(micro_made & wanted)
    all_arguments = list(range(graph.num_arguments))
    run_micro = executable(clustered, micro, all_arguments, crossing)
    run_update = executable(
        clustered,
        updates,
        all_arguments + crossing,
        [v for v in graph.returned if v not in micro_made],
    )
    carried = {
        role.index: crossing.index(v)
        for v, role in zip(graph.returned, results, strict=True)
        if role is not None and role.kind == "state" and v in micro_made
    }
    rows: list[Arrays] = []
    current = list(arguments)
    for m in range(num_micro_batches):
        for a, role in enumerate(roles):
            if role.role == "batch":
                dim = role.batch_dim
                assert dim is not None
                current[a] = np.split(arguments[a], num_micro_batches, dim)[m]
        rows.append(run_micro(current))
        for a, i in carried.items():
            current[a] = rows[-1][i]
    last, mean = rows[-1], [np.mean(column, axis=0, dtype=c.dtype) for column, c in averaged(rows)]
    gradients = [
        mean[i] if clustered.part(v) == "backward" else last[i] for i, v in enumerate(crossing)
    ]
    updated = iter(run_update([*current, *gradients]))
    out: Arrays = []
    for v, role in zip(graph.returned, results, strict=True):
        if v not in micro_made:
            out.append(next(updated))
        elif role is not None and role.kind == "mean":
            out.append(mean[crossing.index(v)])
        else:
            out.append(last[crossing.index(v)])
    return out


def averaged(rows: list[Arrays]):
    return [(column, column[0]) for column in map(list, zip(*rows, strict=True))]


def check_numbers(program: Program, clustered: Clustered, samples: int) -> None:
    """Compares two micro-batches with the reference on all samples."""
    batch = program.batch(2 * samples)
    step = jax.jit(program.by_halves or program.step)
    expected = [np.asarray(x) for x in jax.tree.leaves(step(program.state, batch))]
    arguments = [np.asarray(x) for x in jax.tree.leaves((program.state, batch))]
    found = run_step(clustered, arguments, 2)
    half = any("bf16" in str(value.type) for op in clustered.graph.ops for value in op.results)
    rows = compare(found, expected, "bfloat16" if half else None)
    assert not [row for row in rows if not row.ok]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_clustered_step_is_the_step(name: str) -> None:
    program = PROGRAMS[name]()
    for pipeline in PIPELINES[1:]:
        clustered_step(program, 4, pipeline)  # checks its own result
    check_numbers(program, clustered_step(program, 4), 4)


# A layer of a random program: its parameter of three, the earlier value that is added, the function
# that is applied, and whether it is recomputed.
LAYERS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 5),
        st.sampled_from(["tanh", "sin", "relu", "softmax", "norm"]),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2),
    "clip": adamw_clip_schedule,
    "lamb": lambda: optax.lamb(1e-2),
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "norm": lambda x: x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1.0),
}


@settings(max_examples=6)
@given(
    layers=LAYERS,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    metrics=st.sets(st.sampled_from(["loss", "grad_norm", "early", "output_mean"])),
    pipeline=st.sampled_from(PIPELINES),
)
def test_random_steps(
    layers: list[tuple[int, int, str, bool]], optimizer: str, metrics: set[str], pipeline: str
) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        values = [x]
        for parameter, skip, activation, recomputed in layers:
            layer = lambda p, x, f=ACTIVATIONS[activation]: f(x @ p["w"] + p["b"])  # noqa: E731
            layer = jax.checkpoint(layer) if recomputed else layer
            x = layer(params[parameter], values[-1])
            values.append(x + values[skip] if skip < len(values) - 1 else x)
        loss = jnp.mean((values[-1] - y) ** 2)
        return loss, {"early": jnp.mean(values[1] ** 2), "output_mean": values[-1].mean()}

    transform = OPTIMIZERS[optimizer]()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = transform.update(grads, opt_state, params)
        found = {"loss": loss, "grad_norm": optax.tree.norm(grads)} | aux
        returned = {name: value for name, value in found.items() if name in metrics}
        return (optax.apply_updates(params, updates), opt_state), returned

    params = mlp_params(3)
    program = Program(step, (params, transform.init(params)), regression)
    clustered = clustered_step(program, 4, pipeline.replace("=3", "=2"))
    check_numbers(program, clustered, 4)


def test_a_mask_that_is_computed_once_more_draws_no_gradient_to_the_first_layer() -> None:
    """The forward pass makes the mask once, in layer 0; each layer's backward makes its own."""

    @jax.custom_vjp
    def layer(w: jax.Array, x: jax.Array, mask: jax.Array, kept: jax.Array) -> jax.Array:
        return jnp.where(mask, jnp.tanh(x @ w), 0.0)

    def backward(saved: Any, gradient: jax.Array) -> Any:
        w, x, kept = saved
        hidden = jnp.tanh(x @ w)
        gradient = jnp.where(kept > 0, gradient, 0.0) * (1 - hidden * hidden)
        return x.T @ gradient, gradient @ w.T, None, None

    layer.defvjp(lambda w, x, mask, kept: (layer(w, x, mask, kept), (w, x, kept)), backward)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, kept = batch
        mask = kept > 0
        for w in params:
            x = layer(w, x, mask, kept)
        return (x**2).mean()

    program = trained(loss, [random(i, 8, 8) for i in range(3)], lambda n: (random(5, n, 8),) * 2)
    jitted = jax.jit(program.step, donate_argnums=0)
    lowered = jitted.lower(program.state, program.batch(8)).as_text()
    module = alpa.passes.run(lowered, "simplify-trivial-ops,layer-cluster{num-layers=3}")
    dots = {
        str(op.attributes["origin"]): sum(
            inner.operation.name == "stablehlo.dot_general" for inner in walk(body(op))
        )
        for op in body(main_function(module)).operations
        if "origin" in op.attributes
    }
    backwards = [dots[f'#mpmd.user_origin<"layer_{k}"(1)>'] for k in range(3)]
    assert min(backwards) > 0
    assert max(backwards) <= 3


def test_the_backward_part_reverses_kernels_itself() -> None:
    """A convolution's gradient reads its kernel reversed; no other layer should send that."""
    step = clustered_step(convolutions(), 4)
    reversing = {
        part_of(origin)
        for op, origin in zip(step.graph.ops, step.origins, strict=True)
        if any(inner.name == "stablehlo.reverse" for inner in body(op).operations)
    }
    assert reversing == {"backward"}


# The first layer embeds by @w, the third one projects back by it. The loss's divisor is computed
# from the batch in the second layer, and the loss in the fourth one.
MASKED = """
!m = tensor<8x8xf32>
func.func public @main(
    %w: !m {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %v: !m {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %x: !m {alpa.role = "batch", alpa.batch_dim = 0 : i64},
    %n: !m {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!m {alpa.result = "state:0"}, !m {alpa.result = "state:1"}, tensor<f32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %rate = stablehlo.constant dense<0.1> : !m
  %h0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (!m, !m) -> !m
  %b0 = stablehlo.custom_call @alpa.layer_boundary(%h0) : (!m) -> !m
  %mask = stablehlo.reduce(%n init: %zero) applies stablehlo.add across dimensions = [0, 1]
    : (!m, tensor<f32>) -> tensor<f32>
  %h1 = stablehlo.dot_general %b0, %v, contracting_dims = [1] x [0] : (!m, !m) -> !m
  %b1 = stablehlo.custom_call @alpa.layer_boundary(%h1) : (!m) -> !m
  %y = stablehlo.dot_general %b1, %w, contracting_dims = [1] x [1] : (!m, !m) -> !m
  %b2 = stablehlo.custom_call @alpa.layer_boundary(%y) : (!m) -> !m
  %e = stablehlo.exponential %b2 : !m
  %sum = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1]
    : (!m, tensor<f32>) -> tensor<f32>
  %loss = stablehlo.divide %sum, %mask : tensor<f32>

  %scale = stablehlo.divide %one, %mask : tensor<f32>
  %scales = stablehlo.broadcast_in_dim %scale, dims = [] : (tensor<f32>) -> !m
  %again = stablehlo.exponential %y : !m
  %dy = stablehlo.multiply %again, %scales : !m
  %dw1 = stablehlo.dot_general %dy, %h1, contracting_dims = [0] x [0] : (!m, !m) -> !m
  %dh1 = stablehlo.dot_general %dy, %w, contracting_dims = [1] x [0] : (!m, !m) -> !m
  %dv = stablehlo.dot_general %h0, %dh1, contracting_dims = [0] x [0] : (!m, !m) -> !m
  %dh0 = stablehlo.dot_general %dh1, %v, contracting_dims = [1] x [1] : (!m, !m) -> !m
  %dw0 = stablehlo.dot_general %x, %dh0, contracting_dims = [0] x [0] : (!m, !m) -> !m
  %dw = stablehlo.add %dw0, %dw1 : !m
  %sw = stablehlo.multiply %dw, %rate : !m
  %sv = stablehlo.multiply %dv, %rate : !m
  %w2 = stablehlo.subtract %w, %sw : !m
  %v2 = stablehlo.subtract %v, %sv : !m
  return %w2, %v2, %loss : !m, !m, tensor<f32>
}
"""


def test_what_the_loss_is_divided_by_draws_no_gradient_to_the_layer_that_makes_it() -> None:
    module = alpa.passes.run(MASKED, "simplify-trivial-ops,layer-cluster{clustering=manual}")
    dots = {
        str(op.attributes["origin"]): sum(
            inner.operation.name == "stablehlo.dot_general" for inner in walk(body(op))
        )
        for op in body(main_function(module)).operations
        if "origin" in op.attributes
    }
    found = [dots.get(f'#mpmd.user_origin<"layer_{k}"(1)>', 0) for k in range(4)]
    assert found == [1, 2, 2, 0]


def test_a_delta_that_is_negative() -> None:
    with pytest.raises(ir.MLIRError, match="delta is -1; at least 0"):
        alpa.passes.run(MASKED, "simplify-trivial-ops,layer-cluster{delta=-1}")


@pytest.mark.parametrize(("stages", "layers"), [(1, 16), (4, 16), (8, 32), (32, 40)])
def test_a_fixed_number_of_stages_makes_more_layers(stages: int, layers: int) -> None:
    """160 contractions are 40 layers of four; a stage gets four layers while there are some."""

    def forward(weights: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(160):
            x = x @ weights[number]
        return x

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((160, 8, 8), (4, 8)))
    module = parse(jax.jit(forward).lower(*shapes).as_text())
    with module.context, ir.Location.unknown():
        SimplifyTrivialOps().run(module, lambda *_: None)
        LayerCluster(stages=stages).run(module, lambda *_: None)
        made = walk(body(main_function(module)))
        assert sum(isinstance(op, mpmd.NamedComputationOp) for op in made) == layers


def test_many_equal_blocks_become_small_equal_layers() -> None:
    """20 blocks of two halves: each half is a layer where 72 are allowed, and else 16 are made."""

    x = random(0, 4, 8)
    text = jax.jit(train).lower(weights(20), x).as_text(debug_info=True)

    def layers(most: int) -> list[list[str]]:
        module = parse(text)
        with module.operation.location:
            SimplifyTrivialOps().run(module, lambda *_: None)
            LayerCluster(most=most).run(module, lambda *_: None)
        return [
            [op.operation.name for op in body(op).operations]
            for op in body(main_function(module)).operations
            if isinstance(op, mpmd.NamedComputationOp) and part_of(Origin.of(op)) == "forward"
        ]

    assert len(layers(16)) == 16
    small = layers(72)
    assert len(small) == 40
    # The first layer ends before its sum: an argument crosses no boundary.
    assert len({tuple(ops) for ops in small[2:-1]}) == 1
