"""Three planned steps equal three steps of PyTorch.

Bounds are those between a plan and JAX: 1e-4 of a tensor's largest value after steps of SGD, whose
updates are linear in the gradients. PyTorch and XLA round in their own ways, as two plans do: both
compute in f32, with the same formulas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn = torch.nn
F = nn.functional

SAMPLES = 8
OPTIMIZER = optax.sgd(0.1)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def seeded(number: int) -> np.random.Generator:
    torch.manual_seed(number)
    return np.random.default_rng(number)


def token_batches(count: int, length: int = 8) -> list[dict[str, np.ndarray]]:
    random = seeded(0)
    return [
        {name: random.integers(0, 64, (SAMPLES, length)) for name in ("x", "y")}
        for _ in range(count)
    ]


def tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def new_state(params: Any, buffers: Any) -> dict[str, Any]:
    return {
        "params": params,
        "buffers": buffers,
        "optimizer": OPTIMIZER.init(params),
        "key": jax.random.key(7),
    }


def new_step(loss_of: Any, cluster: str = "cpu:1x2", **options: Any) -> Any:
    """A planned step; `loss_of(params, buffers, key, batch)` returns the loss and the buffers."""

    @alpa.parallelize(
        cluster=cluster, num_stages=2, donate_argnums=0, batch_argnums="batch", **options
    )
    def train_step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])

        def loss_fn(params: Any) -> Any:
            return loss_of(params, state["buffers"], own, batch)

        (loss, buffers), grads = alpa.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "buffers": buffers, "optimizer": optimizer, "key": key}
        return new, loss

    return train_step


def assert_equal(state: Any, losses: Any, module: Any, expected: Any) -> None:
    """The state and the losses are those of PyTorch, and so is a module that they are put into."""
    ours = {**state["buffers"], **state["params"]}
    theirs = models.arrays(module)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        [found] = compare([ours[name]], [array])
        assert found.ok, (name, found)
    assert all(found.ok for found in compare([np.array(losses)], [np.array(expected)]))


def test_a_gpt_equals_pytorch_in_two_stages_and_two_micro_batches() -> None:
    batches = token_batches(3)
    module = models.GPT(layers=2)
    fn, params, buffers = alpa_torch.from_module(module, tuple(tensors(batches[0]).values()))

    # Names are PyTorch's, and the tied weight is one array.
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert "head.weight" not in params
    assert buffers == {}
    assert fn.blocks == tuple(f"blocks.{n}" for n in range(2))

    def loss_of(params: Any, buffers: Any, key: Any, batch: Any) -> Any:
        return fn(params, buffers, None, batch["x"], batch["y"])

    step, state = new_step(loss_of, "cpu:2x2", num_micro_batches=2), new_state(params, buffers)
    plan = step.plan(state, batches[0])
    assert [stage.layers for stage in plan.stages] == [("layer_0",), ("layer_1",)]
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    runs = [tensors(batch) for batch in batches]
    expected = models.trained(
        module, sgd(module), [lambda b=b: module(b["x"], b["y"]) for b in runs]
    )
    assert_equal(state, losses, module, expected)

    other = models.GPT(layers=2)
    alpa_torch.to_module(state["params"], state["buffers"], other)
    np.testing.assert_allclose(other(**runs[0]).item(), module(**runs[0]).item(), rtol=1e-4)
    assert other.head.weight is other.tokens.weight


def resnet_equals_pytorch(**options: Any) -> None:
    random = seeded(1)
    images = random.normal(size=(3, SAMPLES, 3, 8, 8)).astype(np.float32)
    labels = random.integers(0, 10, (3, SAMPLES))
    module = models.ResNet()
    fn, params, buffers = alpa_torch.from_module(module, (torch.from_numpy(images[0]),))

    def loss_of(params: Any, buffers: Any, key: Any, batch: Any) -> Any:
        scores, buffers = fn(params, buffers, None, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean(), buffers

    step, state = new_step(loss_of, **options), new_state(params, buffers)
    losses = []
    for x, y in zip(images, labels, strict=True):
        state, loss = step(state, {"x": x, "y": y})
        losses.append(float(loss))
    state = {name: jax.tree.map(np.asarray, state[name]) for name in ("params", "buffers")}
    assert int(state["buffers"]["layer2.0.norm2.num_batches_tracked"]) == 3
    pairs = [
        (torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(images, labels, strict=True)
    ]
    expected = models.trained(
        module, sgd(module), [lambda x=x, y=y: F.cross_entropy(module(x), y) for x, y in pairs]
    )
    assert_equal(state, losses, module, expected)

    evaluate, _, _ = alpa_torch.from_module(module.eval(), (pairs[0][0],))
    state = jax.device_get(state)  # from the devices of two meshes
    scores, same = evaluate(state["params"], state["buffers"], None, images[0])
    assert all(found.ok for found in compare([scores], [module(pairs[0][0]).detach().numpy()]))
    assert all(same[name] is array for name, array in state["buffers"].items())


def test_a_resnet_equals_pytorch_with_its_running_statistics() -> None:
    resnet_equals_pytorch()


# The default tier runs steps on Ray, and modules of PyTorch on the local executor.
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_resnet_on_ray_equals_pytorch() -> None:
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    resnet_equals_pytorch(executor="ray", workers=workers)


@pytest.mark.slow  # importing transformers takes most of it
def test_gpt2_of_hugging_face_equals_pytorch() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    batches = token_batches(3)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).train()
    example = {"input_ids": torch.from_numpy(batches[0]["x"])}
    example["labels"] = example["input_ids"]
    fn, params, buffers = alpa_torch.from_module(module, (), example)
    assert fn.blocks == ("transformer.h.0", "transformer.h.1")
    assert "transformer.wte.weight" in params
    assert "lm_head.weight" not in params

    def loss_of(params: Any, buffers: Any, key: Any, batch: Any) -> Any:
        output, buffers = fn(params, buffers, None, input_ids=batch["x"], labels=batch["x"])
        return output.loss, buffers

    step, state = new_step(loss_of, num_micro_batches=2), new_state(params, buffers)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    xs = [torch.from_numpy(batch["x"]) for batch in batches]
    expected = models.trained(
        module, sgd(module), [lambda x=x: module(input_ids=x, labels=x).loss for x in xs]
    )
    assert_equal(state, losses, module, expected)


class Dropped(nn.Module):
    """A regression with dropout; `mask` takes its place in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Any, y: Any, mask: Any = None) -> Any:
        h = torch.tanh(self.first(x))
        h = self.dropout(h) if mask is None else h * mask
        return ((self.last(h) - y) ** 2).mean()


def test_dropout_has_another_mask_in_each_step_and_equals_pytorch_with_that_mask() -> None:
    random = seeded(3)
    x = random.normal(size=(SAMPLES, 8)).astype(np.float32)
    y = random.normal(size=(SAMPLES, 1)).astype(np.float32)
    module = Dropped()
    given = (torch.from_numpy(x), torch.from_numpy(y))
    fn, params, buffers = alpa_torch.from_module(module, given)

    def loss_of(params: Any, buffers: Any, key: Any, batch: Any) -> Any:
        return fn(params, buffers, key, batch["x"], batch["y"])

    step, state = new_step(loss_of, num_layers=2), new_state(params, buffers)
    draw, _, _ = alpa_torch.from_module(nn.Dropout(0.5), (torch.ones(SAMPLES, 16),))
    masks, losses = [], []
    for _ in range(3):
        _, own = jax.random.split(state["key"])
        masks.append(np.asarray(draw({}, {}, own, jnp.ones((SAMPLES, 16)))[0]))
        state, loss = step(state, {"x": x, "y": y})
        losses.append(loss)
    assert all({*np.unique(mask)} == {0, 2} and 0.3 < (mask > 0).mean() < 0.7 for mask in masks)
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[1], masks[2])
    given_masks = [torch.tensor(mask) for mask in masks]
    expected = models.trained(
        module, sgd(module), [lambda m=mask: module(*given, m) for mask in given_masks]
    )
    assert_equal(state, losses, module, expected)


def test_two_calls_draw_the_same_and_two_ops_draw_their_own() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    fn, params, buffers = alpa_torch.from_module(module, (torch.ones(64, 64),))
    x, key = jnp.ones((64, 64)), jax.random.key(0)
    first, _ = fn(params, buffers, key, x)
    np.testing.assert_array_equal(first, fn(params, buffers, key, x)[0])
    assert 0.2 < (np.asarray(first) > 0).mean() < 0.3  # both masks: a quarter is kept
    with pytest.raises(TypeError, match=r"draws random numbers, and the key is None"):
        fn(params, buffers, None, x)


def test_gradients_stop_where_pytorch_stops_them() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3) * n) for n in (1.0, 2.0, 3.0))

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = x * self.b
            return (x * self.a + y + (x * self.c).detach() * self.a).sum()

    module = Stopped()
    x = torch.tensor([1.0, 2.0, 3.0])
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    grads = jax.grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)
    module(x).backward()
    for name, parameter in module.named_parameters():
        expected = np.zeros(3) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(grads[name], expected, rtol=1e-6)


def test_numbers_of_tensors_have_no_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

        def forward(self, x: Any) -> Any:
            return (x * self.a / self.a.abs().max().item()).sum()

    module = Scaled()
    x = torch.tensor([1.0, 2.0, 3.0])
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    grads = jax.grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)
    module(x).backward()
    np.testing.assert_allclose(grads["a"], module.a.grad.numpy(), rtol=1e-6)


def test_checks_of_values_are_left_out() -> None:
    """F.one_hot checks the classes."""

    class Classes(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.one_hot(x, 4)

    labels = torch.tensor([0, 3, 1])
    fn, _, _ = alpa_torch.from_module(Classes(), (labels,))
    found = jax.jit(lambda x: fn({}, {}, None, x)[0])(labels.numpy())
    np.testing.assert_array_equal(found, F.one_hot(labels, 4).numpy())


def test_a_weight_that_a_hook_computes() -> None:
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = nn.utils.weight_norm(nn.Linear(4, 3))
    x = torch.randn(5, 4)
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    assert {*params} == {"bias", "weight_g", "weight_v"}
    grads = jax.grad(lambda p: (fn(p, buffers, None, x.numpy())[0] ** 2).sum())(params)
    (module(x) ** 2).sum().backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_buffers_that_no_grad_changes_are_returned() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("average", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            y = x * self.weight
            with torch.no_grad():
                self.average.mul_(0.5).add_(y, alpha=0.5)
            return (y * self.average).sum()

    module = Averaged()
    x = torch.tensor([1.0, 2.0, 3.0])
    fn, params, buffers = alpa_torch.from_module(module, (x,))

    def loss_of(params: Any) -> Any:
        return fn(params, buffers, None, x.numpy())

    grads, new = jax.grad(loss_of, has_aux=True)(params)
    module(x).backward()
    np.testing.assert_allclose(new["average"], module.average.numpy())
    np.testing.assert_allclose(grads["weight"], module.weight.grad.numpy())


def test_parameters_that_are_not_trained_are_among_the_buffers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    fn, params, buffers = alpa_torch.from_module(module, (torch.ones(2, 4),))
    assert [*params] == ["1.weight", "1.bias"]
    assert [*buffers] == ["0.weight", "0.bias"]
    with pytest.raises(KeyError, match=r"neither params nor buffers has 0.weight"):
        fn(params, {}, None, torch.ones(2, 4))


def test_the_function_keeps_no_data_and_not_the_module() -> None:
    module = nn.Linear(4, 4).train()
    fn, params, buffers = alpa_torch.from_module(module, (torch.ones(2, 4),))
    expected = module(torch.ones(3, 4)).detach().numpy()
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_allclose(fn(params, buffers, None, jnp.ones((3, 4)))[0], expected, rtol=1e-5)


def test_a_tensor_that_is_no_buffer_is_a_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([2.0, 3.0])

        def forward(self, x: Any) -> Any:
            return x * self.scale

    fn, params, buffers = alpa_torch.from_module(Scaled(), (torch.ones(4, 2),))
    assert params == buffers == {}
    np.testing.assert_array_equal(fn({}, {}, None, jnp.ones((1, 2)))[0], [[2, 3]])


def test_arguments_and_results_are_trees() -> None:
    class Tree(nn.Module):
        def forward(self, pair: Any, *, scale: float, kind: str, mask: Any = None) -> Any:
            x, y = pair
            y = y if kind == "add" else -y
            return {"sum": (x + y) * scale, "none": mask, "pair": (x, 3)}

    example = ((torch.ones(2), torch.ones(2)),)
    options = {"scale": 2.0, "kind": "add"}
    fn, _, _ = alpa_torch.from_module(Tree(), example, options)
    result, _ = fn({}, {}, None, (jnp.ones(5), np.ones(5, np.float32)), scale=3.0, kind="add")
    np.testing.assert_array_equal(result["sum"], [6] * 5)
    assert result["none"] is None
    assert result["pair"][1] == 3
    result, _ = fn({}, {}, None, (jnp.ones(5), jnp.ones(5)), **{**options, "kind": "subtract"})
    np.testing.assert_array_equal(result["sum"], [0] * 5)
    with pytest.raises(TypeError, match=r"an argument is a set"):
        fn({}, {}, None, ({1}, jnp.ones(5)), **options)


def test_named_results_of_pytorch_are_trees() -> None:
    class Best(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.topk(2), x.max(1)

    x = torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0]])
    fn, _, _ = alpa_torch.from_module(Best(), (x,))
    best, largest = jax.jit(lambda x: fn({}, {}, None, x)[0])(x.numpy())
    np.testing.assert_array_equal(best.values, x.topk(2).values.numpy())
    np.testing.assert_array_equal(largest.indices, x.max(1).indices.numpy())

    predict = alpa.parallelize(lambda x: fn({}, {}, None, x)[0], cluster="cpu:1x2")
    np.testing.assert_array_equal(predict(x.numpy())[0].indices, best.indices)


def test_half_precision_is_kept() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).to(torch.bfloat16)
    x = torch.linspace(-1, 1, 8, dtype=torch.bfloat16).reshape(2, 4)
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    found, _ = fn(params, buffers, None, x)
    assert found.dtype == jnp.bfloat16
    expected = module(x).float().detach().numpy()
    assert all(_.ok for _ in compare([found], [expected], dtype="bfloat16"))


def test_a_layer_ends_between_blocks_that_were_named() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def marks(blocks: Any) -> int:
        fn, params, buffers = alpa_torch.from_module(module, (torch.ones(2, 4),), blocks=blocks)
        jaxpr = jax.make_jaxpr(lambda p: fn(p, buffers, None, jnp.ones((2, 4)))[0])(params)
        return str(jaxpr).count("alpa_layer_boundary")

    assert [marks(blocks) for blocks in (None, ["1", "3"], [])] == [3, 1, 0]
    with pytest.raises(ValueError, match=r"Sequential has no module '4', which blocks= names"):
        alpa_torch.from_module(module, (torch.ones(2, 4),), blocks=["4"])


def test_a_block_that_is_called_again_begins_a_layer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.block(self.block(self.block(x)))

    fn, params, buffers = alpa_torch.from_module(Shared(), (torch.ones(2, 8),), blocks=["block"])
    jaxpr = jax.make_jaxpr(lambda p: fn(p, buffers, None, jnp.ones((2, 8)))[0])(params)
    assert str(jaxpr).count("alpa_layer_boundary") == 2


def test_ops_have_the_lines_of_the_module() -> None:
    fn, params, buffers = alpa_torch.from_module(
        Dropped().eval(), (torch.ones(2, 8), torch.ones(2, 1))
    )

    def step(params: Any, x: Any, y: Any) -> Any:
        return fn(params, buffers, None, x, y)[0]

    lowered = jax.jit(step).lower(params, jnp.ones((2, 8)), jnp.ones((2, 1)))
    text = lowered.as_text(debug_info=True)
    line = Dropped.forward.__code__.co_firstlineno + 1
    assert f'test_module.py":{line}:' in text
    assert "jaten.py" not in text


def test_ops_of_a_module_without_lines_have_that_of_the_call() -> None:
    """PyTorch's own modules are no places for a user."""
    fn, params, buffers = alpa_torch.from_module(nn.Linear(4, 4), (torch.ones(2, 4),))

    def call(params: Any) -> Any:
        return fn(params, buffers, None, jnp.ones((2, 4)))[0]

    text = jax.jit(call).lower(params).as_text(debug_info=True)
    assert f'test_module.py":{call.__code__.co_firstlineno + 1}:' in text
    assert "program.py" not in text


def of_pytorch() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Modules of PyTorch, and arguments."""
    torch.manual_seed(0)
    parametrizations = nn.utils.parametrizations
    image = torch.randn(2, 3, 8, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    pools = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Upsample(scale_factor=2)]
    return {
        "LSTM": (nn.LSTM(4, 8, 2, batch_first=True), (torch.randn(2, 5, 4),)),
        "attention": (nn.MultiheadAttention(8, 2), (torch.randn(2, 5, 8),) * 3),
        "encoder": (nn.TransformerEncoder(layer, 2), (torch.randn(2, 5, 8),)),
        "bag": (nn.EmbeddingBag(10, 4), (torch.tensor([[1, 2, 3], [4, 5, 6]]),)),
        "spectral norm": (parametrizations.spectral_norm(nn.Linear(4, 4)), (torch.randn(2, 4),)),
        "weight norm": (parametrizations.weight_norm(nn.Linear(4, 4)), (torch.randn(2, 4),)),
        "instance norm": (nn.InstanceNorm2d(3, track_running_stats=True), (image,)),
        "group norm": (nn.GroupNorm(3, 3), (image,)),
        "pools": (nn.Sequential(*pools), (image,)),
        "transposed convolution": (nn.ConvTranspose2d(3, 4, 2, 2), (image,)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", of_pytorch())
def test_modules_of_pytorch_compute_what_they_compute_there(name: str) -> None:
    module, args = of_pytorch()[name]
    fn, params, buffers = alpa_torch.from_module(module, args)
    result, buffers = fn(params, buffers, jax.random.key(0), *args)
    expected = torch.utils._pytree.tree_leaves(module(*args))
    for found, tensor in zip(jax.tree.leaves(result), expected, strict=True):
        np.testing.assert_allclose(found, tensor.detach().numpy(), rtol=1e-5, atol=1e-6)
    for buffer, tensor in module.named_buffers():
        np.testing.assert_allclose(buffers[buffer], tensor.numpy(), rtol=1e-5, atol=1e-6)


def test_to_module_refuses_other_structures() -> None:
    _, params, buffers = alpa_torch.from_module(nn.Linear(4, 4), (torch.ones(2, 4),))
    with pytest.raises(ValueError, match=r"Linear has bias, and neither params nor buffers has"):
        alpa_torch.to_module({"weight": params["weight"]}, buffers, nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"weight has shape \(4, 4\), and in the module \(4, 2\)"):
        alpa_torch.to_module(params, buffers, nn.Linear(2, 4))
