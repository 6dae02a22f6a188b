"""The proof that a program is causal, held against what JAX computes, and its refusals."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function, parse, terminator
from alpa.passes.analysis.tokens.causal import Causal, causal
from alpa.passes.analysis.tokens.relate import relate
from alpa.passes.analysis.tokens.relation import Order, TokenRelation
from alpa.passes.base import PassError
from alpa.tools import zoo
from test.passes.analysis.tokens.functions import (
    CAUSAL,
    SIZE,
    TOKENS,
    Function,
    attend,
    masked,
    tril,
)


def lowered(function: Function) -> str:
    x, w = jnp.zeros((2, TOKENS, SIZE)), jnp.zeros((SIZE, SIZE))
    text = jax.jit(function).lower(x, w).as_text()
    role = 'alpa.role = "batch", alpa.batch_dim = 0 : i64'
    return re.sub(r"(%arg0: tensor<2x6x4xf32>)", rf"\1 {{{role}}}", text, count=1)


def analysed(function: Function) -> Causal:
    module = passes.run(lowered(function), "simplify-trivial-ops")
    return causal(main_function(module))


def result_of(found: Causal) -> TokenRelation:
    block = next(iter(found.context.relations)).owner
    assert isinstance(block, ir.Block)
    return found.context.at(terminator(block).operands[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_function_is_proven(name: str) -> None:
    function = CAUSAL[name]
    found = analysed(function)
    assert (found.length, found.dims) == (TOKENS, {0: 1})
    relation = result_of(found)
    assert (relation.kind, relation.dims, relation.late) == ("tokens", (1,), None)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 6, 4), (4, 4)))
    whole = function(x, w)
    for end in range(1, TOKENS):
        other = x.at[:, end:].add(1.0)
        np.testing.assert_array_equal(function(other, w)[:, :end], whole[:, :end])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, w: attend(x, w, lambda s: s), "reduce reduces over keys after the query"),
        (
            lambda x, w: attend(x, w, lambda s: jnp.where(tril().T, s, -1e9)),
            "reduces over the queries of a key",
        ),
        (lambda x, w: attend(x, w, lambda s: jnp.where(tril(), s, -5.0)), "over keys after"),
        (lambda x, w: jnp.einsum("bqk,bkd->bqd", x @ jnp.swapaxes(x, 1, 2), x @ w), "adds up over"),
        (lambda x, w: x - x.mean(axis=1, keepdims=True) @ w, "not linear in it"),
        (lambda x, w: x / jnp.max(x, axis=1, keepdims=True), "over all tokens, not by a sum"),
        (lambda x, w: jnp.roll(x, 1, axis=1) @ w, "moves tokens to other places"),
        (lambda x, w: (x[:, :-1] - x[:, 1:]) @ w, "moves tokens to other places"),
        (lambda x, w: jnp.cumsum(x, axis=1) @ w, "nothing is known of how"),
        (lambda x, w: x.reshape(12, 4) @ w, "joins the dimension of the tokens"),
    ],
)
def test_an_op_that_mixes_tokens_is_named(function: Function, message: str) -> None:
    # Not linear in sums over features, or these could be cut in place of the tokens.
    with pytest.raises(PassError, match=message) as caught:
        analysed(lambda x, w: jnp.tanh(function(x, w) @ w))
    assert "token slices need a model in which no token reads later ones" in caught.value.message


def test_a_batch_without_tokens_is_refused() -> None:
    module = parse(
        """func.func public @main(%x: tensor<2xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
          -> tensor<2xf32> { return %x : tensor<2xf32> }"""
    )
    with pytest.raises(PassError, match="no batch argument has a dimension for tokens"):
        causal(main_function(module))


def test_bidirectional_attention_of_a_zoo_model_is_refused() -> None:
    module = passes.run(zoo.get("t5-tiny").lower(2), "simplify-trivial-ops")
    with pytest.raises(PassError, match="the program is not causal: stablehlo"):
        causal(main_function(module))


def test_gradients_are_late_or_sums() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return masked(-jnp.inf)(x, w).sum()

    x, w = jnp.zeros((2, TOKENS, SIZE)), jnp.zeros((SIZE, SIZE))
    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, w).as_text()
    module = passes.run(text, "simplify-trivial-ops")
    block = body(main_function(module))
    context = relate(block, {0: 1})
    value, of_x, of_w = (context.at(it) for it in terminator(block).operands)
    assert (value.kind, value.late) == ("sum", None)
    assert (of_x.kind, of_x.dims) == ("tokens", (1,))
    assert of_x.late is not None
    assert of_w.kind == "sum"
    assert context.broken() is None


def test_orders_are_joined() -> None:
    a, b, c = Order(), Order(), Order()
    assert a.join(b, differs=True)
    assert b.join(c, differs=True)
    assert (a.first, c.first) == (None, None)
    c.settle(True)
    assert (a.first, b.first) == (True, False)
    assert a.join(c, differs=False)
    assert not a.join(b, differs=False)
    d = Order()
    d.settle(False)
    assert not d.join(a, differs=False)
    assert d.join(b, differs=False)
