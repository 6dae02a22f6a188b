"""Steps that `combine-micro-batches` splits give the whole batch's results, run part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import ir
from alpa.dialects.attributes import is_exact, micro_batches_of


@pytest.mark.parametrize("pipeline", ["combine-micro-batches", "alpa", "stage-mesh-partition"])
@pytest.mark.parametrize("number", [-1, 0, 65_537, 100_000_000_000])
def test_numbers_that_no_plan_has_are_refused_at_once(pipeline: str, number: int) -> None:
    options = "" if pipeline == "combine-micro-batches" else "cluster=cpu:1x2 "
    text = jax.jit(lambda x: x + 1).lower(jnp.ones(4)).as_text()
    with pytest.raises(ir.MLIRError, match=rf"is {number:,}; expected 1 to 65,536"):
        passes.run(text, f"{pipeline}{{{options}num-micro-batches={number}}}")


@dataclass(frozen=True)
class Case:
    """A step and the reason to reject it; the first `states` results are new arguments."""

    function: Callable[..., Any]
    arguments: str
    refusal: str = ""
    number: int = 2
    states: int = 0


_rng = np.random.default_rng(1)
_ARGUMENTS: dict[str, tuple[np.ndarray, int | None]] = {
    "w": (_rng.normal(size=(3,)), None),
    "v": (_rng.normal(size=(3, 5)), None),
    "n": (np.array(3), None),
    "x": (_rng.normal(size=(4, 3)), 0),
    "t": (_rng.normal(size=(3, 4)), 1),
    "m": (np.array([1.0, 0.0, 1.0, 1.0]), 0),
    "y": (np.array([2, 0, 1, 1]), 0),
    "k": (np.array([3, 1, 4, 1]), 0),
}


def _sgd(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(w: jax.Array, *batch: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, *batch)
        return w - 0.1 * gradient, value

    return step


def _squares(w: jax.Array, x: jax.Array) -> jax.Array:
    return (x @ w) ** 2


def _cross_entropy(v: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(x @ v)[jnp.arange(x.shape[0]), y].mean()


def _normalised(w: jax.Array, x: jax.Array) -> jax.Array:
    h = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1)
    return _squares(w, h).mean()


CASES: dict[str, Case] = {
    "mean": Case(_sgd(lambda w, x: _squares(w, x).mean()), "wx", states=1),
    "sum": Case(_sgd(lambda w, x: _squares(w, x).sum()), "wx", states=1),
    "one sample each": Case(_sgd(lambda w, x: _squares(w, x).mean()), "wx", number=4, states=1),
    "time-major": Case(_sgd(lambda w, t: ((w @ t) ** 2).mean()), "wt", states=1),
    "regularised": Case(_sgd(lambda w, x: _squares(w, x).mean() + (w**2).sum()), "wx", states=1),
    "rmse": Case(_sgd(lambda w, x: jnp.sqrt(_squares(w, x).mean())), "wx", states=1),
    "bias under a square": Case(_sgd(lambda w, x: jnp.mean(x + w) ** 2), "wx", states=1),
    "matrix under a square": Case(_sgd(lambda v, x: jnp.mean(x @ v) ** 2), "vx", states=1),
    "masked mean": Case(
        _sgd(lambda w, x, m: (_squares(w, x) * m).sum() / m.sum()), "wxm", states=1
    ),
    "cross entropy": Case(_sgd(_cross_entropy), "vxy", states=1),
    "count of steps and samples": Case(
        lambda n, w, x: (n + x.shape[0], w * 0.9 + 0.1 * x.mean(0)), "nwx", states=2
    ),
    "sum of integers": Case(lambda k: (k.sum(), k.sum() // 2, (k.sum() - 9) > 0), "k"),
    "rows and sums": Case(lambda x: (jnp.tanh(x), x.sum(0), x.mean()), "x"),
    "rows of a mean's divisor": Case(lambda x: x / x.shape[0], "x"),
    "moments": Case(lambda x: (x**2).mean(0) - x.mean(0) ** 2, "x"),
    "unbiased": Case(lambda x: x.sum(0) / (x.shape[0] - 1), "x"),
    "samples over a mean": Case(lambda x: (x / x.mean()).sum(0), "x"),
    "sum repeated for the samples": Case(
        lambda x: jnp.tanh(jnp.broadcast_to(x.sum(), x.shape)).sum(), "x"
    ),
    "numbers of the size": Case(lambda w, x: (w * x.shape[0], jnp.arange(x.shape[0])), "wx"),
    "complex numbers of the size": Case(lambda x: jnp.sum(x + 2j) * (x.shape[0] * 1j), "x"),
    "loop of the size": Case(
        lambda w, x: jax.lax.fori_loop(0, 3, lambda n, c: c * jnp.float64(x.shape[0]), w) * x.sum(),
        "wx",
    ),
    "scan that adds up": Case(
        lambda t: jax.lax.scan(lambda c, r: (c + r.sum(), r * 2), 0.0, t), "t"
    ),
    "batch-norm statistics": Case(_sgd(_normalised), "wx", refusal="subtract", states=1),
    "contrastive logits": Case(
        lambda x: jax.nn.logsumexp(x @ x.T, 1).mean(), "x", refusal="dot_general"
    ),
    "maximum": Case(lambda x: x.max(), "x", refusal="takes the maximum over the samples"),
    "cumsum": Case(lambda x: x.cumsum(0), "x", refusal="reduces over neighbouring samples"),
    "sorted": Case(lambda x: jnp.sort(x, 0)[1], "x", refusal="sorts the samples"),
    "interleaved": Case(lambda x: x[::2].sum(), "x", refusal="takes some of the samples"),
    "positions": Case(lambda x: (x * jnp.arange(x.shape[0])[:, None]).sum(), "x", refusal="arange"),
    "rows times a mean": Case(
        lambda x: x * x.mean(), "x", refusal="holds samples multiplied by a function of all samples"
    ),
    "state that grows": Case(lambda w, x: x, "xx", refusal="is a new state", states=1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_step_equals_the_whole_batch(
    split: Callable[..., str], program: type, name: str
) -> None:
    case = CASES[name]
    pairs = [_ARGUMENTS[letter] for letter in case.arguments]
    made = program(
        function=case.function,
        arguments=tuple(array for array, _ in pairs),
        dims=tuple(None if n < case.states else dim for n, (_, dim) in enumerate(pairs)),
        state=tuple(range(case.states)),
    )
    said = split(made, case.number)
    assert case.refusal in said
    assert bool(case.refusal) == bool(said)


@pytest.mark.parametrize(
    ("attributes", "option", "said"),
    [
        ("", "", "exact if sums over samples are parts of means"),
        ("", "loss-reduction=sum", "exact if sums over samples are parts of sums"),
        ("attributes {alpa.whole = 2 : i64}", "", "exact"),
        ('attributes {alpa.micro_batches = "independent"}', "", "independent"),
    ],
)
def test_the_module_says_what_the_proof_assumes(attributes: str, option: str, said: str) -> None:
    text = f"""
    module {attributes} {{
      func.func public @main(
          %x: tensor<4xf32> {{alpa.role = "batch", alpa.batch_dim = 0 : i64}}) -> tensor<f32> {{
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        return %0 : tensor<f32>
      }}
    }}"""
    module = passes.run(text, f"combine-micro-batches{{num-micro-batches=2 {option}}}")
    assert micro_batches_of(module) == said
    assert is_exact(said) == said.startswith("exact")
