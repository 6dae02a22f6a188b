"""A PyTorch GPT with dropout, trained by PyTorch's AdamW on two meshes of virtual CPU devices.

    python examples/torch_gpt.py

The module and the optimizer become pure functions, so the step also works with `jax.jit`. The
trained weights return to the module.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch import nn

import alpa
import alpa.torch

jax.config.update("jax_num_cpu_devices", 4)

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 32, 2, 2


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        # A layer of the plan ends between two blocks of a list.
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # Tied weights stay one array.
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        logits = self.head(x)[:, :-1]
        losses = nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return losses.mean()


torch.manual_seed(0)
module = GPT()
# Each token is the one before plus one: after some steps, the model predicts it.
first = np.random.default_rng(0).integers(0, VOCABULARY, (32, 1))
tokens = (first + np.arange(LENGTH)) % VOCABULARY
fn, params, buffers = alpa.torch.from_module(module, (torch.from_numpy(tokens),))
update, moments = alpa.torch.from_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2), module)


@alpa.parallelize(cluster="cpu:2x2", num_micro_batches=2, num_stages=2, donate_argnums=0)
def train_step(state: Any, tokens: Any) -> Any:
    # Dropout draws from a new key in each step.
    key, key_of_step = jax.random.split(state["key"])

    def loss_fn(params: Any) -> Any:
        return fn(params, state["buffers"], key_of_step, tokens)

    (loss, buffers), grads = alpa.value_and_grad(loss_fn, has_aux=True)(state["params"])
    params, moments = update(state["params"], state["moments"], grads)
    return {"params": params, "buffers": buffers, "moments": moments, "key": key}, loss


def main() -> None:
    state = {"params": params, "buffers": buffers, "moments": moments, "key": jax.random.key(0)}
    report = alpa.compare_with_jax(train_step, state, tokens)
    print(report.summary())
    assert not report.is_fault
    for number in range(20):
        state, loss = train_step(state, tokens)
        print(f"step {number}: loss {float(loss):.4f}")
    alpa.torch.to_module(state["params"], state["buffers"], module)
    with torch.no_grad():
        print(f"PyTorch, without dropout: loss {module.eval()(torch.from_numpy(tokens)):.4f}")


if __name__ == "__main__":
    main()
