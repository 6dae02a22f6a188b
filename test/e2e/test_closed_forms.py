"""Collectives of planned training steps, as XLA partitions them, against closed forms.

The communication of each program can be derived by hand. All devices are on one axis, and tensors
are so large that bytes outweigh latencies. An all-reduce moves as many bytes as a reduce-scatter
and an all-gather of the same value: `summed` counts them alike and checks that every reduce-scatter
has its all-gather. XLA's program is read before collectives are merged, so counts are exact.
Collectives of at most `SMALL` bytes, such as the loss, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import parse
from alpa.tools.check_plan import ModuleCheck, check

DEVICES = 4
SMALL = 1024

Loss = Callable[..., jax.Array]
Found = dict[str, Counter[int]]
"""by kind, how often which bytes"""


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned_and_compiled(
    loss: Loss, parameters: Any, *batch: Any, options: str = "intra=auto"
) -> dict[str, ModuleCheck]:
    """The parts of a step of gradient descent on one mesh: `forward`, `backward`, `update`."""

    def step(parameters: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, parameters, gradients), value

    text = jax.jit(step, donate_argnums=0).lower(parameters, *batch).as_text()
    fixed = f"cluster=v100-16gb:1x{DEVICES} num-layers=1 num-stages=1 mesh-rank=1"
    planned = passes.run(text, f"alpa{{{fixed} {options}}},export-stages{{merge=false}}")
    checks = check(parse(str(planned)), jax.devices())
    return {c.name.rpartition(".")[2]: c for c in checks}


def real(*modules: ModuleCheck) -> Found:
    """The collectives that XLA runs in some modules together; each spans all devices."""
    found: Found = {}
    for c in (c for module in modules for c in module.real.collectives if c.bytes > SMALL):
        assert c.devices == DEVICES
        found.setdefault(c.kind, Counter())[c.bytes] += c.count
    return found


def summed(found: Found) -> Counter[int]:
    """The all-reduces, and reduce-scatters that have an all-gather. There must be no other
    collective.
    """
    assert found.keys() <= {"all-reduce", "reduce-scatter", "all-gather"}
    scattered = found.get("reduce-scatter", Counter())
    assert found.get("all-gather", Counter()) == scattered
    return found.get("all-reduce", Counter()) + scattered


def sizes(parameters: Any) -> Counter[int]:
    """The number of parameters of each size in bytes."""
    return Counter(4 * prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    *inner, last = weights
    for w in inner:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ last) ** 2)


def test_an_mlp_with_a_large_batch_sums_its_gradients() -> None:
    """With a split batch, weights are gathered and their gradients are partial sums."""
    weights = [array(1024, 1024)] * 4
    parts = planned_and_compiled(mlp, weights, array(65536, 1024))
    assert summed(real(*parts.values())) == sizes(weights)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("intra", ["auto", "data-parallel"])
def test_tied_weights_are_reduced_once(intra: str, num_micro_batches: int) -> None:
    """The gradients of a matrix that is used twice, once transposed, have one sum."""

    def tied(parameters: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ parameters["tied"])
        return jnp.mean((hidden @ parameters["tied"].T - y) ** 2)

    parameters, batch = {"tied": array(1024, 1024)}, array(65536 // num_micro_batches, 1024)
    options = f"intra={intra} num-micro-batches={num_micro_batches}"
    parts = planned_and_compiled(tied, parameters, batch, batch, options=options)
    assert summed(real(parts["update"])) == sizes(parameters)
    assert not real(parts["forward"], parts["backward"])


@pytest.mark.parametrize("layers", range(2, 17))
def test_a_wide_mlp_with_a_small_batch_sums_activations(layers: int) -> None:
    """Expects L - 1 sums of the activation's size.

    Weights are split in turn by columns and rows. A layer split by rows leaves partial sums of its
    result, one split by columns leaves partial sums of its input's gradient. The first layer's
    input has no gradient, so with columns first every layer but the first has one sum. Any other
    order has as many: one sum per boundary between two layers that are split alike, half of them in
    the backward part.
    """
    batch, width = 512, 8192
    parts = planned_and_compiled(mlp, [array(width, width)] * layers, array(batch, width))
    assert summed(real(*parts.values())) == {4 * batch * width: layers - 1}


BATCH, SEQUENCE, HIDDEN, HEADS = 8, 64, 1024, 16


def encoder_layer() -> dict[str, jax.ShapeDtypeStruct]:
    head = HIDDEN // HEADS
    return {
        "qkv": array(HIDDEN, 3, HEADS, head),
        "qkv_bias": array(3, HEADS, head),
        "out": array(HEADS, head, HIDDEN),
        "out_bias": array(HIDDEN),
        "attention_scale": array(HIDDEN),
        "attention_shift": array(HIDDEN),
        "up": array(HIDDEN, 4 * HIDDEN),
        "up_bias": array(4 * HIDDEN),
        "down": array(4 * HIDDEN, HIDDEN),
        "down_bias": array(HIDDEN),
        "mlp_scale": array(HIDDEN),
        "mlp_shift": array(HIDDEN),
    }


def normalised(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def encoder_block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer like BERT's: normalised after each residual sum, every token attends to all."""
    qkv = jnp.einsum("bsm,mknd->bsknd", x, p["qkv"]) + p["qkv_bias"]
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / (HIDDEN // HEADS) ** 0.5
    heads = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
    attended = jnp.einsum("bsnd,ndm->bsm", heads, p["out"]) + p["out_bias"]
    x = normalised(x + attended, p["attention_scale"], p["attention_shift"])
    y = jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    return normalised(x + y, p["mlp_scale"], p["mlp_shift"])


def encoder(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for p in layers:
        x = encoder_block(p, x)
    return jnp.mean(jnp.tanh(x) ** 2)


@pytest.mark.parametrize(
    "layers", [1, 2, 4, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (8, 16))]
)
def test_a_bert_encoder_under_tensor_parallelism(layers: int) -> None:
    """Expects 4 L - 1 sums of batch x sequence x hidden.

    Heads and the inner width are split. In the forward part the attention's output projection and
    the second matrix leave partial sums, in the backward part the gradients of the inputs of q, k,
    v and the first matrix do. The first layer's input, here the embedded tokens, has no gradient.
    """
    parameters = [encoder_layer()] * layers
    parts = planned_and_compiled(encoder, parameters, array(BATCH, SEQUENCE, HIDDEN))
    activation = 4 * BATCH * SEQUENCE * HIDDEN
    assert summed(real(*parts.values())) == {activation: 4 * layers - 1}


@pytest.mark.parametrize("layers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rematerialised_bert_encoder_under_tensor_parallelism(layers: int) -> None:
    """Expects 6 L - 1 sums: the backward part computes the two sums of each forward layer again."""

    def rematerialised(parameters: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for p in parameters:
            x = jax.checkpoint(encoder_block)(p, x)
        return jnp.mean(jnp.tanh(x) ** 2)

    parts = planned_and_compiled(
        rematerialised, [encoder_layer()] * layers, array(BATCH, SEQUENCE, HIDDEN)
    )
    activation = 4 * BATCH * SEQUENCE * HIDDEN
    sums = summed(real(*parts.values()))
    sent = sum(size * count for size, count in sums.items())
    assert sent <= 1.05 * (6 * layers - 1) * activation


GROUPS, TOKENS, WIDTH, EXPERTS, INNER, SLOTS = 16, 2048, 1024, 16, 4096, 128
EXCHANGED = 4 * GROUPS * EXPERTS * SLOTS * WIDTH // DEVICES
"""Bytes of the experts' inputs, or outputs, on one device."""


def mixture(p: dict[str, jax.Array], x: jax.Array, *, weigh_slots: bool) -> jax.Array:
    """A dense layer, so that the experts' input has a gradient, and experts, one per token.

    The gate's weight multiplies the values that come back from the slots or, as in GShard, the
    tokens' places in the slots.
    """
    x = jnp.tanh(x @ p["dense"])
    gates = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = ((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1).astype(jnp.int32)
    dispatch = jnp.einsum("gse,gsc->gsec", chosen, jax.nn.one_hot(place, SLOTS))
    combine = dispatch * gates[..., None] if weigh_slots else dispatch
    y = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    y = jax.nn.relu(jnp.einsum("egcm,emf->egcf", y, p["up"]))
    y = jnp.einsum("egcf,efm->egcm", y, p["down"])
    y = jnp.einsum("gsec,egcm->gsm", combine, y)
    if not weigh_slots:
        y *= (gates * chosen).sum(-1, keepdims=True)
    return jnp.mean(jnp.tanh(y) ** 2)


@cache
def experts(*, weigh_slots: bool) -> dict[str, ModuleCheck]:
    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return mixture(p, x, weigh_slots=weigh_slots)

    parameters = {
        "dense": array(WIDTH, WIDTH),
        "gate": array(WIDTH, EXPERTS),
        "up": array(EXPERTS, WIDTH, INNER),
        "down": array(EXPERTS, INNER, WIDTH),
    }
    return planned_and_compiled(loss, parameters, array(GROUPS, TOKENS, WIDTH))


@pytest.mark.parametrize("weigh_slots", [False, True])
def test_experts_exchange_tokens_twice_on_the_way_forward(weigh_slots: bool) -> None:
    """All-to-alls to the experts and back.

    Groups and experts are split over all devices. The experts' gradients need no sum; those of the
    dense layer and of the gate do.
    """
    parts = experts(weigh_slots=weigh_slots)
    assert real(parts["forward"])["all-to-all"] == {EXCHANGED: 2}
    found = real(*parts.values())
    assert found.pop("all-to-all").keys() == {EXCHANGED}
    assert summed(found) == {4 * WIDTH * WIDTH: 1, 4 * WIDTH * EXPERTS: 1}


@pytest.mark.parametrize("weigh_slots", [False, True])
def test_experts_exchange_gradients_twice_on_the_way_back(weigh_slots: bool) -> None:
    """All-to-alls of the gradients of the experts' outputs and inputs.

    The weights' gradients need nothing else that the forward part has not exchanged.
    """
    assert real(experts(weigh_slots=weigh_slots)["backward"])["all-to-all"] == {EXCHANGED: 2}


def convolutions(p: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    y = images
    for w in p["convolutions"]:
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.nn.relu(jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=dims))
    scores = jax.nn.log_softmax(y.mean((1, 2)) @ p["classes"])
    return -jnp.take_along_axis(scores, labels[:, None], 1).mean()


def test_a_convolution_net_sums_its_gradients() -> None:
    """The same as the MLP with a large batch: only batch normalisation would join images."""
    channels = [3, 256, 256, 256]
    parameters = {
        "convolutions": [array(3, 3, a, b) for a, b in pairwise(channels)],
        "classes": array(channels[-1], 1000),
    }
    labels = jax.ShapeDtypeStruct((1024,), jnp.int32)
    parts = planned_and_compiled(convolutions, parameters, array(1024, 32, 32, 3), labels)
    assert summed(real(*parts.values())) == sizes(parameters)


@pytest.mark.parametrize(
    "wrong",
    [
        {"all-reduce": Counter({4096: 1}), "all-to-all": Counter({4096: 1})},
        {"reduce-scatter": Counter({4096: 2}), "all-gather": Counter({4096: 1})},
    ],
)
def test_other_reductions_are_not_counted_as_sums(wrong: Found) -> None:
    with pytest.raises(AssertionError):
        summed(wrong)
