"""Token slices compute what whole sequences do: losses and gradients, on one mesh and on two."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import FLOPS, SECONDS, read_float, read_part
from alpa.dialects.plan import Plan
from alpa.passes.tokens.estimate import best_slices, slice_seconds, spans
from alpa.tools import zoo
from alpa.tools.zoo.gpt import GPT, GPTConfig
from test.passes.analysis.tokens.functions import CAUSAL, SIZE, TOKENS

SHARDED = "place-gradient-reductions,ilp-shard-annotate,insert-cross-mesh-reshard"


class Step(NamedTuple):
    """A step of gradient descent: it returns the new parameters and the mean loss."""

    run: Callable[..., tuple[jax.Array, ...]]
    parameters: Sequence[np.ndarray]
    batch: Sequence[np.ndarray]


def lowered(step: Step, num_micro_batches: int) -> str:
    """The step at the size of a micro-batch, with roles."""
    count = len(step.parameters)
    small = [it[: len(it) // num_micro_batches] for it in step.batch]
    donated = tuple(range(count))
    text = jax.jit(step.run, donate_argnums=donated).lower(*step.parameters, *small).as_text()
    for number in range(count, count + len(small)):
        role = 'alpa.role = "batch", alpa.batch_dim = 0 : i64'
        text = re.sub(rf"(%arg{number}: tensor<\S+>)", rf"\1 {{{role}}}", text, count=1)
    # Of the results, only the loss has no argument that it replaces.
    return re.sub(r"tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax', text, count=1)


def staged(
    step: Step,
    *,
    stages: int = 1,
    micro_batches: int = 1,
    devices: int = 1,
    remat: str = "none",
) -> str:
    options = f"num-stages={stages} num-micro-batches={micro_batches} schedule=gpipe remat={remat}"
    layers = 2 if len(step.parameters) > 4 else 1
    return str(
        alpa.passes.run(
            lowered(step, micro_batches),
            f"combine-micro-batches{{num-micro-batches={micro_batches}}},simplify-trivial-ops,"
            f"layer-cluster{{num-layers={layers}}},"
            f"stage-mesh-partition{{cluster=cpu:1x{stages * devices} {options}}}",
        )
    )


def results(step: Step, text: str) -> list[np.ndarray]:
    return [np.asarray(it) for it in alpa.runtime.load(text)(*step.parameters, *step.batch)]


def check(step: Step, sliced: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
    """Losses and gradients are equal to 1e-5 of the largest."""
    *new, loss = sliced
    *expected, expected_loss = whole
    assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss)
    moved = [it - old for it, old in zip(expected, step.parameters, strict=True)]
    for one, other, change in zip(new, expected, moved, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(change).max()


def descent(loss: Callable[..., jax.Array], count: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A step long enough that parameters change by more than they are rounded by."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        value, gradients = jax.value_and_grad(lambda p: loss(p, *arrays[count:]))(arrays[:count])
        return (*(p - 100 * g for p, g in zip(arrays, gradients, strict=False)), value)

    return run


@cache
def gpt(layers: int = 4, hidden: int = 16, samples: int = 8) -> Step:
    config = GPTConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=2,
        vocab_size=32,
        sequence_length=64,
        dtype=jnp.float32,
    )
    model = GPT(config)
    rng = np.random.default_rng(0)
    batch = [rng.integers(32, size=(samples, 64)).astype(np.int32) for _ in range(2)]
    variables = model.init(jax.random.key(0), batch[0])
    leaves, tree = jax.tree.flatten(variables)

    def loss(parameters: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        given = jax.tree.unflatten(tree, parameters)
        return model.apply(given, tokens, targets, method="loss")

    return Step(descent(loss, len(leaves)), [np.asarray(it) for it in leaves], batch)


def whole(step: Step) -> list[np.ndarray]:
    return [np.asarray(it) for it in jax.jit(step.run)(*step.parameters, *step.batch)]


MANY = "8+8+8+8+8+8+8+8"


@pytest.mark.parametrize(
    ("layers", "lengths", "stages", "micro_batches", "devices"),
    [
        (2, "24+40", 2, 2, 1),
        *(
            pytest.param(4, lengths, stages, micro_batches, devices, marks=pytest.mark.slow)
            for lengths in ("32+32", "24+16+16+8", MANY)
            for stages, micro_batches, devices in [(1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1)]
        ),
        pytest.param(4, "24+16+16+8", 2, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_sliced_gpt_equals_the_whole_one(
    layers: int, lengths: str, stages: int, micro_batches: int, devices: int
) -> None:
    step = gpt(layers)
    text = staged(step, stages=stages, micro_batches=micro_batches, devices=devices)
    planned = alpa.passes.run(text, f"token-slice{{lengths={lengths}}},{SHARDED}")
    fragments = [
        read_part(op)
        for op in body(main_function(planned)).operations
        if isinstance(op, mpmd.FragmentOp)
    ]
    count = len(lengths.split("+"))
    assert (fragments.count("forward"), fragments.count("backward")) == (count * stages,) * 2
    check(step, results(step, str(planned)), whole(step))


@cache
def of_function(name: str) -> Step:
    rng = np.random.default_rng(1)
    w = rng.normal(size=(SIZE, SIZE)).astype(np.float32)
    x = rng.normal(size=(4, TOKENS, SIZE)).astype(np.float32)

    def loss(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(CAUSAL[name](jnp.tanh(x @ parameters[0]), parameters[0])))

    return Step(descent(loss, 1), [w], [x])


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("added", "keys first", "experts")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CAUSAL
    ],
)
def test_sliced_functions_have_the_same_gradients(name: str) -> None:
    step = of_function(name)
    text = staged(step)
    planned = alpa.passes.run(text, f"token-slice{{lengths=3+2+1}},{SHARDED}")
    check(step, results(step, str(planned)), whole(step))


def test_work_is_dealt_out() -> None:
    text = staged(of_function("added"))

    def work(lengths: str) -> list[tuple[float, int]]:
        module = alpa.passes.run(text, f"token-slice{{lengths={lengths}}}")
        return [
            (read_float(op, SECONDS) or 0.0, ir.IntegerAttr(op.attributes[FLOPS]).value)
            for op in body(main_function(module)).operations
            if isinstance(op, mpmd.FragmentOp) and read_part(op) == "forward"
        ]

    (whole_work,) = work("6")
    for first, second, all_ in zip(*work("3+3"), whole_work, strict=True):
        # A later slice attends to more tokens; both leave out pairs that the mask hides.
        assert 0 < first < second < first + second < all_


def test_rematerialised_attention_is_refused() -> None:
    text = staged(gpt(2), stages=1, remat="layer")
    with pytest.raises(Exception, match="computes what attention reads of earlier tokens again"):
        alpa.passes.run(text, "token-slice{lengths=32+32}")


@pytest.mark.slow
def test_the_best_slices_are_no_slower_than_uniform_ones() -> None:
    """Without calls, which take longer than a small model does on a GPU."""
    options = "num-stages=4 num-micro-batches=1 schedule=gpipe remat=none"
    module = alpa.passes.run(
        zoo.get("gpt-tiny").lower(256),
        "combine-micro-batches,simplify-trivial-ops,layer-cluster{num-layers=4},"
        f"stage-mesh-partition{{cluster=cpu:1x4 {options}}}",
    )

    def latency_of(lengths: Sequence[int]) -> float:
        seconds = slice_seconds(module, spans(lengths)).max(axis=1)
        return seconds.sum() + 3 * seconds.max()

    lengths, seconds, whole_seconds = best_slices(module, 32, 2, 1)
    assert sum(lengths) == 32
    assert len(lengths) > 2
    assert seconds == pytest.approx(latency_of(lengths), rel=0.05)
    assert whole_seconds == pytest.approx(latency_of([32]))
    assert seconds <= 1.02 * min(latency_of([32 // count] * count) for count in (1, 2, 4, 8))


def test_slices_are_chosen_by_their_latency() -> None:
    remarks: list[str] = []
    text = staged(of_function("added"), stages=1)
    planned = alpa.passes.run(
        text, "token-slice{granularity=3}", on_remark=lambda _, it: remarks.append(it)
    )
    (remark,) = remarks
    same = r"slices of 6 tokens: .* take (\S+ \S+) by the cost model, and \1 without slices"
    assert re.fullmatch(same, remark)
    assert str(planned).count("mpmd.fragment<") == text.count("mpmd.fragment<")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("granularity=0", "granularity is 0; expected 1 or more tokens"),
        ("lengths=3+0+3", "lengths is '3\\+0\\+3'; expected the tokens of each slice joined by +"),
        ("lengths=", "lengths is ''; expected the tokens of each slice"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        alpa.passes.run(staged(of_function("added")), f"token-slice{{{options}}}")


def test_a_schedule_that_would_hold_more_is_refused() -> None:
    text = staged(of_function("added"), micro_batches=2).replace('"gpipe"', '"1f1b"')
    with pytest.raises(Exception, match=r"the schedule is 1f1b, .* plan with schedule=gpipe"):
        alpa.passes.run(text, "token-slice{lengths=3+3}")


TERAPIPE = "schedule=terapipe cluster=cpu:1x2 num-stages=2 num-layers=2 mesh-shape=1"


@pytest.mark.slow
def test_terapipe_plans_token_slices() -> None:
    remarks: list[str] = []
    given = lowered(gpt(2, hidden=64, samples=64), 1)
    options = f"alpa{{{TERAPIPE}}}"
    planned = alpa.passes.run(given, options, on_remark=lambda _, it: remarks.append(it))
    (lengths,) = [match[1] for it in remarks if (match := re.match(r"slices of (\S+) tokens", it))]
    count = len(lengths.split("+"))
    assert count > 1
    ops = body(main_function(planned)).operations
    parts = [read_part(op) for op in ops if isinstance(op, mpmd.FragmentOp)]
    assert (parts.count("forward"), parts.count("backward")) == (2 * count, 2 * count)
    whole_plan = alpa.passes.run(given, options.replace("terapipe", "gpipe"))
    sliced, without = (Plan.read(main_function(it)) for it in (planned, whole_plan))
    assert sliced is not None
    assert without is not None
    assert sliced.predicted_step_seconds < without.predicted_step_seconds


def test_terapipe_does_not_rematerialise() -> None:
    with pytest.raises(Exception, match="remat=layer computes them again"):
        alpa.passes.run(lowered(of_function("added"), 1), f"alpa{{{TERAPIPE} remat=layer}}")


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_step_with_token_slices_equals_jax(executor: str, request: Any) -> None:
    if executor == "ray":
        request.getfixturevalue("ray_cluster")
    step = of_function("added")
    options = {"schedule": "terapipe", "num_micro_batches": 2, "executor": executor}
    with alpa.parallelize(step.run, cluster="cpu:1x2", num_stages=1, **options) as sliced:
        found = [np.asarray(it) for it in sliced(*step.parameters, *step.batch)]
    for one, other in zip(found, whole(step), strict=True):
        assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()


class Encoder(nn.Module):
    """Attention to all tokens, and a layer on each of them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.SelfAttention(num_heads=2)(x)
        return nn.Dense(SIZE)(nn.gelu(nn.Dense(SIZE)(x)))


def test_a_bidirectional_model_is_refused_at_the_op_that_mixes() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, TOKENS, SIZE)).astype(np.float32)
    leaves, tree = jax.tree.flatten(Encoder().init(jax.random.key(0), x))

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(Encoder().apply(jax.tree.unflatten(tree, parameters), x)))

    step = Step(descent(loss, len(leaves)), [np.asarray(it) for it in leaves], [x])
    reduced = r"error: .*not causal: stablehlo\.reduce reduces over keys after the query"
    with pytest.raises(Exception, match=reduced):
        alpa.passes.run(staged(step), "token-slice{lengths=3+3}")
