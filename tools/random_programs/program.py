"""A random program: a training step or a forward pass of jax, drawn from a seed.

    program = draw(7)
    jax.jit(program.function())(*program.arguments(0))

A step is `step(state, batch, flag, key) -> state, loss, others`, a forward pass `forward(params,
batch, flag) -> outputs, others`. Losses are means over samples and what else comes back is a mean,
a count or grows with the batch: so a step is the same whether its batch is cut into micro-batches
or not. Where it drops out at random, or its forward part writes state, it is not, and `looped` says
so: then plain jax has to go from micro-batch to micro-batch, as `looped_function` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa
from alpa.tools.random_programs import layers
from alpa.tools.random_programs.layers import FLAGS, INDICES, Inputs, Layer, Size

CLASSES = 7
_STREAM = 0x5EED
"""Apart from other uses of small seeds."""

DTYPES = {"f32": 0.5, "f64": 0.2, "bf16": 0.1, "f16": 0.08, "mixed": 0.12}
"""How often each is drawn; `mixed` computes in bf16 and keeps parameters in f32."""


def _schedule() -> Any:
    return optax.cosine_decay_schedule(0.1, 50)


# 16 bits cannot hold the 1e-8 that adaptive optimizers add to roots by default.
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "scheduled": lambda: optax.sgd(_schedule(), momentum=0.5),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
    "adamw-clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.01)
    ),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-3),
    "adagrad": lambda: optax.adagrad(1e-2, eps=1e-3),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-3),
}
NARROW = ("bf16", "f16")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer in a program, with the number of the block whose parameters it has.

    `skip` is the number of a block whose output is added to its own, -1 that of the input.
    """

    layer: Layer
    owner: int
    skip: int | None = None
    checkpoint: bool = False
    boundary: bool = False

    def __str__(self) -> str:
        notes = [
            f" +skip {self.skip}" if self.skip is not None else "",
            f" shares {self.owner}" if self.shared else "",
            " checkpoint" if self.checkpoint else "",
            " |" if self.boundary else "",
        ]
        return self.layer.name + "".join(notes)

    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class RandomProgram:
    """What a seed says of a program; `size` is that of its input, per sample."""

    seed: int
    training: bool
    dtype: str
    optimizer: str
    size: Size
    tokens: bool
    head: str
    blocks: tuple[Block, ...]
    extras: frozenset[str]
    micro_batch: int
    micro_batches: int
    number: str
    """one of NUMBERS"""

    def __str__(self) -> str:
        what = f"training, {self.optimizer}" if self.training else "inference"
        inputs = f"{'tokens' if self.tokens else 'floats'} {self.size[0]}x{self.size[1]}"
        extras = f"; with {', '.join(sorted(self.extras))}" if self.extras else ""
        blocks = "; ".join(f"{number} {block}" for number, block in enumerate(self.blocks))
        return (
            f"{what}, {self.dtype}, {self.micro_batches} x {self.micro_batch} samples of {inputs}: "
            f"{blocks}; {self.head}{extras}; number: {self.number}"
        )

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of ops in it."""
        kinds = frozenset[str]().union(*(block.layer.kinds for block in self.blocks))
        said = {
            "skip": any(block.skip is not None for block in self.blocks),
            "shared parameters": self.head == "tied" or any(b.shared for b in self.blocks),
            "checkpoint": any(block.checkpoint for block in self.blocks),
            "random bits": "dropout" in self.extras,
            "state of the forward part": "running" in self.extras,
            "gather": self.tokens or self.head != "squares",
            "integers": self.tokens or self.head != "squares",
            "dot": self.head != "squares",
        }
        return kinds | {kind for kind, is_there in said.items() if is_there}

    @property
    def narrow(self) -> bool:
        """Whether 16-bit floats are computed with."""
        return self.dtype in (*NARROW, "mixed")

    @property
    def looped(self) -> bool:
        """Whether cutting its batch into micro-batches changes what it computes."""
        return bool(self.extras & {"running", "dropout"})

    def widened(self) -> RandomProgram:
        """The same in 64 bits."""
        return replace(self, dtype="f64")

    @property
    def out(self) -> Size:
        """The size of what the last block gives."""
        return self.blocks[-1].layer.size if self.blocks else self.size

    @property
    def _state_dtype(self) -> Any:
        names = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
        return jnp.dtype(names.get(self.dtype, "float32"))

    @property
    def _compute_dtype(self) -> Any:
        return jnp.dtype(jnp.bfloat16) if self.dtype == "mixed" else self._state_dtype

    def params(self) -> dict[str, dict[str, np.ndarray]]:
        """The parameters at the start."""
        generator = np.random.default_rng([_STREAM, self.seed, 1])
        shapes: dict[str, Mapping[str, tuple[int, ...]]] = {
            f"block_{number:02}": block.layer.shapes
            for number, block in enumerate(self.blocks)
            if not block.shared
        }
        if self.tokens:
            shapes["embedding"] = {"w": (INDICES, self.size[1])}
        if self.head == "cross-entropy":
            shapes["head"] = {"w": (self.out[1], CLASSES)}
        if self.number in ("factor", "uncertainty"):
            shapes["number"] = {"w": ()}
        return {
            name: {part: self._parameter(generator, shape) for part, shape in parts.items()}
            for name, parts in shapes.items()
        }

    def _parameter(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        normal = generator.normal(size=shape)
        value = 1 + 0.1 * normal if len(shape) < 2 else normal * shape[-2] ** -0.5
        return np.asarray(value, self._state_dtype)

    def batch(self, seed: int) -> dict[str, np.ndarray]:
        """The samples of one step."""
        generator = np.random.default_rng([_STREAM, self.seed, 2, seed])
        samples = self.micro_batch * self.micro_batches
        batch: dict[str, np.ndarray] = {
            "indices": generator.integers(0, INDICES, (samples, self.size[0])).astype(np.int32)
        }
        if not self.tokens:
            x = generator.normal(size=(samples, *self.size))
            batch["x"] = x.astype(self._compute_dtype)
        if self.training and self.head == "squares":
            y = 2 * generator.normal(size=(samples, *self.out))
            batch["y"] = y.astype(self._compute_dtype)
        return batch

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """Those of the first step: the state, a batch, the number that branches go by."""
        params = self.params()
        flag = np.int32(np.random.default_rng([_STREAM, self.seed, 3, seed]).integers(FLAGS))
        if not self.training:
            return params, self.batch(seed), flag
        with jax.enable_x64(self.dtype == "f64"):
            opt_state = jax.tree.map(np.asarray, OPTIMIZERS[self.optimizer]().init(params))
        state: dict[str, Any] = {"params": params, "opt": opt_state}
        if "frozen" in self.extras:
            scale = np.linspace(0.7, 1.3, self.size[1]).astype(self._state_dtype)
            state["frozen"] = {"scale": scale}
        if "average" in self.extras:
            state["average"] = jax.tree.map(lambda w: w * np.array(0.5, w.dtype), params)
        if "running" in self.extras:
            width = self.blocks[len(self.blocks) // 2].layer.size[1]
            state["running"] = np.linspace(-0.2, 0.2, width).astype(self._state_dtype)
        key = np.asarray(jax.random.PRNGKey(self.seed % 1000 + seed))
        return state, self.batch(seed), flag, key

    def outputs(self, state: Any, batch: Any, flag: Any, key: Any) -> tuple[Any, Any, Any]:
        """What the last block, and the head behind it, makes of a batch.

        With it comes a loss of what is in the middle, and the running means that are state.
        """
        dtype = self._compute_dtype
        params = jax.tree.map(lambda w: w.astype(dtype), state["params"])
        inputs = Inputs(indices=batch["indices"], flag=flag)
        x = params["embedding"]["w"][batch["indices"]] if self.tokens else batch["x"]
        running, early = state.get("running"), None
        if "frozen" in self.extras:
            x = x * state["frozen"]["scale"].astype(dtype)
        before = {-1: x}
        for number, block in enumerate(self.blocks):
            apply = jax.checkpoint(block.layer.apply) if block.checkpoint else block.layer.apply
            y = apply(params.get(f"block_{block.owner:02}", {}), x, inputs)
            if block.skip is not None:
                y = y + before[block.skip] * jnp.asarray(0.5, y.dtype)
            # Long programs neither fade nor grow.
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 0.3)
            if number == 0 and "dropout" in self.extras:
                # Bits, not `bernoulli`: that draws others in 64 bits.
                keep = jax.random.bits(key, y.shape, jnp.uint8) < 192
                y = jnp.where(keep, y / 0.75, 0).astype(y.dtype)
            if number == len(self.blocks) // 2 and "early loss" in self.extras:
                early = 0.1 * jnp.mean(jnp.sin(y.astype(jnp.promote_types(dtype, jnp.float32))))
            if number == len(self.blocks) // 2 and running is not None:
                mean = jax.lax.stop_gradient(y).mean((0, 1)).astype(running.dtype)
                running = 0.9 * running + 0.1 * mean
                y = y - running.astype(y.dtype)
            before[number] = x = y
            if block.boundary:
                alpa.mark_layer_boundary()
        if self.head == "cross-entropy":
            x = x @ params["head"]["w"]
        elif self.head == "tied":
            x = x @ params["embedding"]["w"].T
        return x, early, running

    def loss(
        self, params: Any, state: Any, batch: Any, flag: Any, key: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """The mean loss of a batch, the outputs and the new running means."""
        outputs, early, running = self.outputs({**state, "params": params}, batch, flag, key)
        wide = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
        if self.head == "squares":
            loss = jnp.mean((wide - batch["y"].astype(wide.dtype)) ** 2)
        else:
            labels = batch["indices"][
                :, np.arange(wide.shape[1], dtype=np.int32) % batch["indices"].shape[1]
            ]
            log_probabilities = jax.nn.log_softmax(wide)
            chosen = jnp.take_along_axis(
                log_probabilities, (labels % wide.shape[-1])[..., None], axis=-1
            )
            loss = -chosen.mean()
        if "number" in params:
            number = params["number"]["w"].astype(loss.dtype)
            loss = number * loss if self.number == "factor" else jnp.exp(-number) * loss + number
        return loss if early is None else loss + early, (outputs, running)

    def function(self) -> Callable[..., Any]:
        """The program itself."""
        return self._step if self.training else self._forward

    def looped_function(self) -> Callable[..., Any]:
        """The same at the whole batch: where `looped`, from micro-batch to micro-batch."""
        return self._looped_step if self.looped and self.micro_batches > 1 else self.function()

    def gradients(self, state: Any, batch: Any, flag: Any, key: Any) -> Any:
        """The loss, outputs, running means and gradients of a batch."""
        gradient = alpa.value_and_grad if "marks gradients" in self.extras else jax.value_and_grad
        both = gradient(self.loss, has_aux=True)
        (loss, (outputs, running)), grads = both(state["params"], state, batch, flag, key)
        return loss, outputs, running, grads

    def update(self, state: Any, running: Any, loss: Any, grads: Any) -> Any:
        """The state after a step."""
        optimizer, params = OPTIMIZERS[self.optimizer](), state["params"]
        updates, opt_state = optimizer.update(grads, state["opt"], params)
        if self.number == "rate":
            rate = loss / (1 + jnp.abs(loss))
            updates = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        new = {**state, "params": optax.apply_updates(params, updates), "opt": opt_state}
        if "guarded" in self.extras:
            finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        if "average" in self.extras:
            old, now = state["average"], new["params"]
            new["average"] = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, now)
        if running is not None:
            new["running"] = running
        return new

    def _step(self, state: Any, batch: Any, flag: Any, key: Any) -> Any:
        loss, outputs, running, grads = self.gradients(state, batch, flag, key)
        new = self.update(state, running, loss, grads)
        return new, loss, self._others(outputs, batch, flag, loss, grads)

    def _looped_step(self, state: Any, batch: Any, flag: Any, key: Any) -> Any:
        """One step by plain jax: keys are folded, running means go from one to the next."""
        now, parts = state, []
        for m in range(self.micro_batches):
            rows = slice(m * self.micro_batch, (m + 1) * self.micro_batch)
            part = jax.tree.map(lambda array, rows=rows: array[rows], batch)
            loss, outputs, running, grads = self.gradients(
                now, part, flag, jax.random.fold_in(key, m)
            )
            if running is not None:
                now = {**now, "running": running}
            parts.append((loss, outputs, grads))
        losses, outputs, grads = zip(*parts, strict=True)

        def mean(*arrays: Any) -> Any:
            wide = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays]
            return (jnp.stack(wide).sum(0) / len(wide)).astype(arrays[0].dtype)

        grads, loss = jax.tree.map(mean, *grads), mean(*losses)
        new = self.update(state, now.get("running"), loss, grads)
        return new, loss, self._others(jnp.concatenate(outputs), batch, flag, loss, grads)

    def _forward(self, params: Any, batch: Any, flag: Any) -> Any:
        outputs, *_ = self.outputs({"params": params}, batch, flag, None)
        return outputs, self._others(outputs, batch, flag, None, None)

    def _others(self, outputs: Any, batch: Any, flag: Any, loss: Any, grads: Any) -> dict[str, Any]:
        others: dict[str, Any] = {}
        if "outputs" in self.extras:
            others["outputs"] = outputs
        if "mean" in self.extras:
            wide = jnp.promote_types(outputs.dtype, jnp.float32)
            others["mean"] = jnp.mean(outputs.astype(wide) ** 2)
        if "count" in self.extras:
            others["count"] = jnp.sum(batch["indices"] % 3 == 0, dtype=jnp.int32)
        if "largest" in self.extras:
            others["largest"] = jnp.max(batch["indices"], axis=1)
        if "inputs" in self.extras:
            others["inputs"] = batch["indices"], flag, flag + 1
        if grads is not None and "gradients" in self.extras:
            others["gradients"] = grads
        if loss is not None and "twice" in self.extras:
            others["twice"] = loss, 2 * loss
        return others


EXTRAS = {
    "outputs": 0.2,
    "mean": 0.2,
    "count": 0.2,
    "largest": 0.1,
    "inputs": 0.1,
    "gradients": 0.15,
    "marks gradients": 0.4,
    "twice": 0.1,
    "frozen": 0.15,
    "average": 0.12,
    "running": 0.12,
    "dropout": 0.12,
    "early loss": 0.15,
    "guarded": 0.12,
}
"""What a program may have besides its blocks, and how often it is drawn."""
NUMBERS = {"none": 0.8, "factor": 0.07, "uncertainty": 0.07, "rate": 0.06}
"""What a number is: a parameter that the loss has as a factor, or as its uncertainty, or a rate of
the update that depends on the loss; and how often each is drawn."""
_INFERENCE = frozenset({"outputs", "mean", "count", "largest", "inputs"})


def draw(seed: int) -> RandomProgram:
    """The program of a seed."""
    generator = np.random.default_rng([_STREAM, seed, 0])
    training = bool(generator.random() < 0.75)
    dtype = str(generator.choice(list(DTYPES), p=list(DTYPES.values())))
    size = int(generator.choice([3, 4, 6, 8])), int(generator.choice([4, 6, 8, 12]))
    tokens = bool(generator.random() < 0.4)
    blocks = _draw_blocks(generator, size)
    out = blocks[-1].layer.size
    heads = ["squares", "cross-entropy"]
    if tokens and out[1] == size[1]:
        heads.append("tied")
    extras = {name for name, share in EXTRAS.items() if generator.random() < share}
    program = RandomProgram(
        seed=seed,
        training=training,
        dtype=dtype,
        optimizer=str(generator.choice(list(OPTIMIZERS))),
        size=size,
        tokens=tokens,
        head=str(generator.choice(heads)),
        blocks=blocks,
        extras=frozenset(extras if training else extras & _INFERENCE),
        micro_batch=int(generator.choice([1, 2, 3, 4, 8])),
        micro_batches=int(generator.choice([1, 2, 4], p=[0.12, 0.44, 0.44])),
        number=str(generator.choice(list(NUMBERS), p=list(NUMBERS.values()))),
    )
    return program if training else replace(program, number="none")


def _draw_blocks(generator: np.random.Generator, size: Size) -> tuple[Block, ...]:
    blocks: list[Block] = []
    sizes = [size]
    marks = generator.random() < 0.25
    for number in range(int(generator.integers(2, 8))):
        block = Block(layer=layers.draw(generator, sizes[-1]), owner=number)
        like = [n for n in range(number) if sizes[n] == sizes[-1] and not blocks[n].shared]
        if like and generator.random() < 0.15:
            owner = int(generator.choice(like))
            block = replace(block, layer=blocks[owner].layer, owner=owner, shared=True)
        sizes.append(block.layer.size)
        back = [n - 1 for n in range(number + 1) if sizes[n] == sizes[-1]]
        if back and generator.random() < 0.35:
            block = replace(block, skip=int(generator.choice(back)))
        block = replace(
            block,
            checkpoint=bool(generator.random() < 0.12),
            boundary=bool(marks and generator.random() < 0.6),
        )
        blocks.append(block)
    return tuple(blocks)
