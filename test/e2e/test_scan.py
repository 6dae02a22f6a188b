"""Training steps with their layers in `lax.scan` compute what plain JAX computes.

The loops are cut between the stages: two meshes of two virtual devices, several micro-batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa import passes, runtime
from alpa.dialects import body, ir, main_function, mpmd, walk
from alpa.dialects.attributes import read_arguments, read_part
from alpa.dialects.plan import read_meshes
from alpa.passes.schedules.named import NAMES
from alpa.passes.schedules.planned import chunks_of
from alpa.runtime.cut_array import CutArray
from alpa.runtime.local import LocalExecutable
from alpa.runtime.reference import compare

MICRO_BATCH, NUM_MICRO_BATCHES = 4, 4
SHAPES = {
    "q": (8, 2, 4),
    "k": (8, 2, 4),
    "v": (8, 2, 4),
    "o": (2, 4, 8),
    "up": (8, 16),
    "bias": (16,),
    "down": (16, 8),
    "scale": (8,),
}


def random(seed: int, *shape: int) -> jax.Array:
    return 0.3 * jax.random.normal(jax.random.PRNGKey(seed), shape)


def norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def transformer_layer(p: Any, x: jax.Array) -> jax.Array:
    y = norm(p, x)
    q, k, v = (jnp.einsum("bsd,dhe->bshe", y, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), axis=-1)
    x = x + jnp.einsum("bhst,bthe,hed->bsd", weights, v, p["o"])
    return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def feed_forward_layer(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


LAYERS = {
    "feed-forward": feed_forward_layer,
    "transformer": transformer_layer,
    "all of it computed once more": jax.checkpoint(transformer_layer),
    "its dots kept": jax.checkpoint(
        transformer_layer, policy=jax.checkpoint_policies.dots_saveable
    ),
}


@dataclass(frozen=True)
class Step:
    """A language model with scanned layers; each layer also reads its own number."""

    num_layers: int
    optimizer: optax.GradientTransformation
    layer: str

    def init(self) -> Any:
        names = ("up", "bias", "down") if self.layer == "feed-forward" else SHAPES
        layers = {name: random(i, self.num_layers, *SHAPES[name]) for i, name in enumerate(names)}
        params = {"embedding": random(9, 12, 8), "layers": layers}
        return params, self.optimizer.init(params)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        layer = LAYERS[self.layer]

        def scanned(carry: Any, p: Any) -> tuple[Any, None]:
            number, x = carry
            return (number + 1, layer(p, x) * (1 + 0.01 * number)), None

        (_, x), _ = jax.lax.scan(scanned, (0, params["embedding"][tokens]), params["layers"])
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1).mean()

    def __call__(self, params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(self.loss)(params, tokens)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def lower(self) -> str:
        tokens = jax.ShapeDtypeStruct((MICRO_BATCH, 6), jnp.int32)
        jitted = jax.jit(self.__call__, donate_argnums=(0, 1))
        return jitted.lower(*self.init(), tokens).as_text()


def tokens(batches: int = NUM_MICRO_BATCHES) -> jax.Array:
    samples = MICRO_BATCH * batches
    return jnp.asarray(np.random.default_rng(3).integers(0, 12, (samples, 6)), jnp.int32)


def numpy_leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def planned(
    step: Step, schedule: str, num_layers: int, meshes: int = 2, batches: int = NUM_MICRO_BATCHES
) -> ir.Module:
    return passes.run(
        step.lower(),
        f"alpa{{cluster=cpu:2x2 num-stages={meshes * chunks_of(schedule)} num-layers={num_layers} "
        f"schedule={schedule} num-micro-batches={batches}}}",
    )


def check(
    step: Step,
    module: ir.Module,
    steps: int = 2,
    executor: Literal["local", "ray"] = "local",
    batches: int = NUM_MICRO_BATCHES,
) -> None:
    """Runs some steps, each on the state that the previous one returned."""
    with runtime.load(module, executor=executor) as executable:
        check_steps(step, executable, steps, tokens(batches))


def check_steps(step: Step, executable: Any, steps: int, batch: jax.Array) -> None:
    state = step.init()
    results: Any = numpy_leaves(state)
    count = len(results)
    for _ in range(steps):
        results = executable(*results[:count], batch)
        *state, loss = jax.jit(step)(*state, batch)
        wrong = [
            row for row in compare(numpy_leaves(results), numpy_leaves((state, loss))) if not row.ok
        ]
        assert not wrong
    # A stack of layers stays cut: in parts, or as one array over the devices of both meshes.
    assert not isinstance(executable, LocalExecutable) or any(
        isinstance(result, CutArray) or len(result.sharding.device_set) == 4 for result in results
    )


def test_a_loop_is_cut_between_two_stages() -> None:
    step = Step(5, optax.sgd(0.1), "feed-forward")
    module = planned(step, "1f1b", 3)
    held = Counter((a.input, a.slice) for a in read_arguments(main_function(module)))
    shared = {number for (number, rows), copies in held.items() if copies > 1 and rows is not None}
    assert not shared  # no layer's state is on both meshes
    for op in body(main_function(module)).operations:
        if isinstance(op, mpmd.FragmentOp):
            names = Counter(inner.operation.name for inner in walk(body(op)))
            assert read_part(op) != "update" or not names["stablehlo.dot_general"]
            assert read_part(op) == "update" or names["stablehlo.while"]
    check(step, module)


def test_loops_of_split_backwards_equal_plain_jax() -> None:
    step = Step(4, optax.sgd(0.1), "feed-forward")
    check(step, planned(step, "zb-h1", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-1f1b:4"]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_loop_is_cut_between_stages_of_one_mesh(layer: str, schedule: str) -> None:
    step = Step(8, optax.sgd(0.1, momentum=0.9), layer)
    check(step, planned(step, schedule, 8))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_all_schedules_equal_plain_jax(layer: str, num_layers: int, schedule: str) -> None:
    step = Step(4, optax.sgd(0.1, momentum=0.9), layer)
    check(step, planned(step, schedule, num_layers))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("executor", ["local", "ray"])
@pytest.mark.parametrize("meshes", [2, 4])
@pytest.mark.parametrize("schedule", NAMES)
def test_all_schedules_on_two_and_four_meshes(
    schedule: str, meshes: int, executor: Literal["local", "ray"]
) -> None:
    step = Step(8, optax.sgd(0.1, momentum=0.9), "transformer")
    module = planned(step, schedule, 8, meshes, batches=8)
    assert len(read_meshes(main_function(module))) == meshes
    check(step, module, executor=executor, batches=8)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 5])
def test_adam_with_a_global_norm_is_as_close_to_float64_as_plain_jax(num_layers: int) -> None:
    step = Step(5, optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), "feed-forward")
    module = planned(step, "1f1b", num_layers)
    executable = runtime.load(module)
    state = step.init()
    mine = numpy_leaves(executable(*numpy_leaves(state), tokens()))
    theirs = numpy_leaves(jax.jit(step)(*state, tokens()))
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda leaf: jnp.asarray(
                leaf, jnp.float64 if leaf.dtype == jnp.float32 else leaf.dtype
            ),
            state,
        )
        exact = numpy_leaves(jax.jit(step)(*wide, tokens()))
    a, b, true = (
        np.concatenate([leaf.ravel() for leaf in leaves]) for leaves in (mine, theirs, exact)
    )
    assert np.linalg.norm(a - true) <= 4 * np.linalg.norm(b - true)
