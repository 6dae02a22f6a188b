from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects import ir, main_function, parse, walk
from alpa.dialects.attributes import Argument, Result, ResultRole, read_arguments, read_results
from alpa.tools import zoo
from alpa.tools.zoo.__main__ import main
from alpa.tools.zoo.llama import rotate
from alpa.tools.zoo.moe import top2_gating
from alpa.tools.zoo.t5 import relative_bucket

TINY = [name for name in zoo.names() if "tiny" in name]
FULL = [name for name in zoo.names() if "tiny" not in name]
# The programs that run are smaller still than the tiny ones: compiling takes all the time.
RUN = {
    "gpt-tiny": {"num_layers": 2},
    "moe-tiny": {"num_layers": 2},
    "wresnet-tiny": {"stage_sizes": (1, 1)},
    "t5-tiny": {"num_layers": 1},
    "llama-tiny": {"num_layers": 1},
    "unet-tiny": {"multipliers": (1,)},
}
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}

# Raffel et al. 2020 name T5's sizes by words.
T5_SIZES = {"small": 60e6, "base": 220e6, "large": 770e6, "3b": 3e9, "11b": 11e9}


def compiled(function, **options):
    return jax.jit(function, compiler_options=FAST_TO_COMPILE, **options)


def constant_bytes(module):
    """The largest constant that is written out, in bytes."""
    constants = [op for op in walk(module.body) if op.name == "stablehlo.constant"]
    values = [ir.DenseElementsAttr(op.attributes["value"]) for op in constants]
    return max((np.asarray(v).nbytes for v in values if not v.is_splat), default=0)


def nominal_size(name):
    size = name.split("-")[1]
    if name.startswith("t5-"):
        return T5_SIZES[size]
    return float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]


def check_contract(program, text, micro_batch_size):
    module = parse(text)
    main = main_function(module)
    state = jax.tree.leaves(program.state_shapes())
    batch = program.batch_shapes(micro_batch_size)

    states = range(len(state))
    assert read_arguments(main) == [
        *(Argument(role="state", aliasing_output=number) for number in states),
        *(
            Argument(role="key") if name == "dropout" else Argument(role="batch", batch_dim=0)
            for name in sorted(batch)
        ),
    ]
    assert read_results(main) == [
        *(Result(role=ResultRole("state", number)) for number in states),
        Result(role=ResultRole("mean")),
    ]

    given = [*state, *(batch[name] for name in sorted(batch))]
    assert [ir.RankedTensorType(t).shape for t in main.type.inputs] == [
        list(g.shape) for g in given
    ]
    assert main.type.results[:-1] == main.type.inputs[: len(state)]
    assert str(main.type.results[-1]) == "tensor<f32>"
    assert constant_bytes(module) <= 64


@pytest.mark.parametrize(
    "name", ["gpt-350m", "moe-380m", "wresnet-250m", "t5-small", "unet-36m", "llama-8b"]
)
def test_parameters_agree_with_the_name(name):
    assert zoo.get(name).num_parameters() == pytest.approx(nominal_size(name), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_every_size(name):
    program = zoo.get(name)
    assert program.num_parameters() == pytest.approx(nominal_size(name), rel=0.08)
    check_contract(program, program.lower(4), 4)


@pytest.mark.parametrize("name", TINY)
def test_lowered_module_follows_the_contract(name):
    program = zoo.get(name)
    check_contract(program, program.lower(4), 4)


@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
def test_every_optimizer_lowers(optimizer):
    program = zoo.get("gpt-tiny", optimizer=optimizer, num_layers=1)
    check_contract(program, program.lower(2), 2)


def check_training(program):
    state, batch = program.init_state(0), program.random_batch(0, 8)
    step = compiled(program.train_step, donate_argnums=0)
    losses = []
    for _ in range(6):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert all(after < before for before, after in itertools.pairwise(losses)), losses
    assert losses[-1] < 0.999 * losses[0]


@pytest.mark.parametrize("name", RUN)
def test_training_lowers_the_loss(name):
    check_training(zoo.get(name, optimizer="sgd", **RUN[name]))


def test_adam_lowers_the_loss():
    check_training(zoo.get("gpt-tiny", num_layers=1))


@pytest.mark.parametrize(
    "name",
    [
        "gpt-tiny",
        "moe-tiny",
        "t5-tiny",
        "unet-tiny",
        pytest.param("llama-tiny", marks=pytest.mark.slow),
    ],
)
def test_loss_is_the_mean_over_micro_batches(name):
    # The smaller U-Net has one level and no skip over a change of size; this one has both.
    program = zoo.get(name, **({} if name == "unet-tiny" else RUN[name]))
    state, batch = program.init_state(0), program.random_batch(1, 8)

    @compiled
    def losses(params, batch):
        def loss(batch):
            return program.loss(params, state.model_state, batch)[0]

        micro_batches = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
        return loss(batch), jax.lax.map(loss, micro_batches)

    whole, parts = losses(state.params, batch)
    assert len(set(parts.tolist())) == 4
    assert abs(whole - parts.mean()) < 1e-5


def test_batch_norm_writes_running_averages():
    program = zoo.get("wresnet-tiny", **RUN["wresnet-tiny"])
    state = program.init_state(0)
    _, model_state = compiled(program.loss)(*state[::2], program.random_batch(0, 4))
    before, after = state.model_state["batch_stats"], model_state["batch_stats"]
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
    assert jax.tree.leaves(changed)
    assert all(jax.tree.leaves(changed))


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_dropout_follows_its_key(name):
    program = zoo.get(name, num_layers=2, dropout=0.1)
    state, batch = program.init_state(0), program.random_batch(0, 2)
    loss = compiled(program.loss)
    key, other = jnp.array([0, 1], jnp.uint32), jnp.array([0, 2], jnp.uint32)
    first = loss(state.params, {}, batch | {"dropout": key})[0]
    assert first == loss(state.params, {}, batch | {"dropout": key})[0]
    assert first != loss(state.params, {}, batch | {"dropout": other})[0]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_decoders_are_causal(name):
    program = zoo.get(name, num_layers=2)
    params, tokens = program.init_state(0).params, program.random_batch(0, 1)["tokens"]
    logits = compiled(program.config.model().apply)
    before = logits({"params": params}, tokens)
    after = logits({"params": params}, tokens.at[0, 20].add(-1))
    np.testing.assert_array_equal(before[0, :20], after[0, :20])
    assert jnp.all(jnp.any(before[0, 20:] != after[0, 20:], axis=-1))


def test_gpt_untied_has_a_projection_of_its_own():
    tied, untied = zoo.get("gpt-tiny"), zoo.get("gpt-tiny", tied=False)
    assert untied.num_parameters() - tied.num_parameters() == 256 * 64


@pytest.mark.parametrize("capacity", [2, 4, 16])
def test_top2_gating_against_a_loop(capacity):
    groups, tokens, experts = 3, 16, 4
    rng = np.random.default_rng(0)
    gates = rng.dirichlet(np.ones(experts), size=(groups, tokens)).astype(np.float32)

    expected = np.zeros((groups, tokens, experts, capacity))
    balance = 0.0
    for g in range(groups):
        used = np.zeros(experts, int)
        order = np.argsort(-gates[g], axis=-1)[:, :2]
        share = np.bincount(order[:, 0], minlength=experts) / tokens
        balance += experts * (share * gates[g].mean(axis=0)).sum() / groups
        for rank, token in itertools.product(range(2), range(tokens)):
            expert = order[token, rank]
            if used[expert] < capacity:
                weight = gates[g, token, expert] / gates[g, token, order[token]].sum()
                expected[g, token, expert, used[expert]] = weight
            used[expert] += 1

    combine, auxiliary = top2_gating(jnp.asarray(gates), capacity)
    np.testing.assert_allclose(combine, expected, atol=1e-6)
    np.testing.assert_allclose(auxiliary, balance, rtol=1e-5)


def test_relative_buckets():
    distance = jnp.array([-1000, -128, -20, -8, -7, 0, 1, 7, 8, 20, 128])
    both = relative_bucket(distance, bidirectional=True, num_buckets=32, max_distance=128)
    assert both.tolist() == [15, 15, 10, 8, 7, 0, 17, 23, 24, 26, 31]
    past = relative_bucket(distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert past.tolist() == [31, 31, 17, 8, 7, 0, 0, 0, 0, 0, 0]


def test_rotary_positions_turn_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 16, 3, 8)).astype(np.float32)
    angle = np.outer(np.arange(16), 100.0 ** (-np.arange(4) / 4))[:, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), 100.0), expected, atol=1e-5)


def test_query_heads_of_a_group_share_keys_and_values():
    grouped = zoo.get("llama-tiny", num_layers=1)
    heads, kv_heads = grouped.config.num_heads, grouped.config.num_kv_heads
    whole = zoo.get("llama-tiny", num_layers=1, num_kv_heads=heads)

    def ungrouped(path, shape, kernel):
        if path[-2].key in ("key", "value"):
            return jnp.repeat(kernel, heads // kv_heads, axis=-2)
        return kernel.reshape(shape.shape)

    params, tokens = grouped.init_state(0).params, grouped.random_batch(0, 2)["tokens"]
    repeated = jax.tree_util.tree_map_with_path(ungrouped, whole.state_shapes().params, params)
    mine = compiled(grouped.config.model().apply)({"params": params}, tokens)
    theirs = compiled(whole.config.model().apply)({"params": repeated}, tokens)
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_integers_lie_within_range():
    batch = zoo.get("wresnet-tiny").random_batch(0, 512)
    assert set(np.unique(batch["labels"]).tolist()) == set(range(16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zoo.get("gpt-2.6"), r"no program is called 'gpt-2.6'; try gpt-2.6b"),
        (
            lambda: zoo.get("gpt-tiny", optimizer="adamw"),
            "no optimizer is called 'adamw'; try adam",
        ),
        (lambda: zoo.get("llama-tiny", num_kv_heads=3), "num_kv_heads must divide num_heads"),
        (lambda: zoo.get("gpt-tiny", num_layer=2), "no field of gpt-tiny .* try num_layers"),
        (lambda: zoo.get("gpt-tiny").lower(0), "gpt-tiny: a batch holds at least 1 sample, got 0"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_command_line_writes_the_module(tmp_path):
    path = tmp_path / "gpt.mlir"
    options = ["--micro-batch-size", "3", "--optimizer", "sgd", "-o", str(path)]
    assert main(["gpt-tiny", *options]) == 0
    assert path.read_text() == zoo.get("gpt-tiny", optimizer="sgd").lower(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-tine"], "try gpt-tiny"),
        (["gpt-tiny", "--micro-batch-size", "0"], "at least 1 sample, got 0"),
        ([], "--list lists them"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_command_line_lists_parameters(monkeypatch, capsys):
    monkeypatch.setattr(zoo, "names", lambda: ["gpt-tiny"])
    assert main(["--list"]) == 0
    assert f"{zoo.get('gpt-tiny').num_parameters():,}" in capsys.readouterr().out
