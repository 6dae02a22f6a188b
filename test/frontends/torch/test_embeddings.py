"""Embeddings and bags of them have PyTorch's results and gradients, also in a plan."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import alpa
from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn = torch.nn


def test_embeddings_by_frequency() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(6, 3, padding_idx=1, scale_grad_by_freq=True)
    models.assert_module_like_pytorch(module, torch.tensor([[0, 2, 2], [1, 2, 0], [1, 1, 5]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    words = torch.tensor([0, 2, 3, 1, 2, 2, 4, 5])
    offsets = torch.tensor([0, 3, 3, 4])  # the second bag is empty
    module = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)
    models.assert_module_like_pytorch(module, words, offsets)
    for rows in (words.view(4, 2), torch.tensor([[2, 2], [0, 3]])):  # the first bag is empty
        models.assert_module_like_pytorch(
            nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding), rows
        )
    models.assert_module_like_pytorch(
        nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=True), words,
        torch.tensor([0, 3, 4, 8]),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[0, 2, 5], [0, 0, 5, 5], [0, 3, 7]])
def test_rows_after_the_last_offset_are_in_no_bag(mode: str, offsets: list[int]) -> None:
    """As PyTorch documents it. Given such rows, it drops them only in sums, not in gradients."""
    torch.manual_seed(0)
    words, ends = torch.tensor([0, 2, 3, 1, 2, 2, 4, 5]), torch.tensor(offsets)
    module = nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=True)
    fn, params, buffers = alpa_torch.from_module(module, (words, ends))

    def run(params: Any) -> Any:
        result, _ = fn(params, buffers, None, words.numpy(), ends.numpy())
        return (result**2).sum(), result

    grads, result = jax.grad(run, has_aux=True)(params)
    expected = module(words[: offsets[-1]], ends)
    (expected**2).sum().backward()
    pairs = [(result, expected), (grads["weight"], module.weight.grad)]
    if mode == "sum":
        pairs.append((result, module(words, ends)))
    for found, right in pairs:
        [difference] = compare([found], [right.detach().numpy()])
        assert difference.ok, difference


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_in_micro_batches(mode: str) -> None:
    torch.manual_seed(0)
    module = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=2)
    words = torch.randint(0, 6, (8, 4))
    fn, params, buffers = alpa_torch.from_module(module, (words,))

    @alpa.parallelize(cluster="cpu:1x1", num_micro_batches=2, batch_argnums="words")
    def step(params: Any, words: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (fn(params, buffers, None, words)[0] ** 2).mean()

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    (module(words) ** 2).mean().backward()
    expected = (module.weight - module.weight.grad).detach().numpy()
    [difference] = compare([step(params, words.numpy())["weight"]], [expected])
    assert difference.ok, difference


def test_offsets_of_one_step_that_leave_a_longer_bag() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3)

        def forward(self, words: Any) -> Any:
            return self.bag(words, torch.arange(0, 8, 4))

    torch.manual_seed(0)
    models.assert_module_like_pytorch(Bags(), torch.tensor([0, 2, 3, 1, 2, 2, 4, 5, 1, 1]))


def test_weights_of_a_bag() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3, mode="sum")

        def forward(self, words: Any, offsets: Any, weights: Any) -> Any:
            return self.bag(words, offsets, weights)

    torch.manual_seed(0)
    words, offsets = torch.tensor([0, 2, 3, 1]), torch.tensor([0, 3])
    weights = torch.from_numpy(np.linspace(1, 2, 4, dtype=np.float32))
    models.assert_module_like_pytorch(Weighted(), words, offsets, weights)
