"""A random program: a training step or a forward pass in JAX, drawn from a seed.

    program = draw(7)
    jax.jit(program.reference())(*program.arguments(0))

Its arguments are `state, batch, second, weights, flag, key` (`layouts.py`). A step returns `state,
loss, others`, a forward pass `outputs, others`. Blocks, optimizer and `EXTRAS` are drawn in
`draw.py`; features that may mix samples, and more that must not, in `features.py`.

**Its label** is known by construction (`truth`): several micro-batches compute what the whole batch
computes, or the same except for random numbers of samples, or something else. `reference` is plain
JAX at the whole batch, with the random numbers of the micro-batches. If each micro-batch is a batch
of its own, plain JAX loops over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa
from stress.random_programs.blocks import Block, Given
from stress.random_programs.features import Features
from stress.random_programs.gradients import WAYS, Problem
from stress.random_programs.insertions import wide
from stress.random_programs.layers import FLAGS, INDICES, Inputs, Size
from stress.random_programs.losses import LOSSES
from stress.random_programs.metrics import METRICS
from stress.random_programs.noise import Noise
from stress.random_programs.optimizers import OPTIMIZERS, WRAPPERS
from stress.random_programs.states import STATES, Values
from stress.random_programs.truth import Truth

CLASSES = 7
STREAM = 0x5EED
"""Separates these random streams from other uses of small seeds."""


NARROW = ("bf16", "f16")


@dataclass(frozen=True, kw_only=True)
class RandomProgram:
    """The description of a program by its seed; `size` is that of its input, per sample."""

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
    features: Features = field(default_factory=Features)

    def __str__(self) -> str:
        what = f"training, {self.optimizer}" if self.training else "inference"
        inputs = f"{'tokens' if self.tokens else 'floats'} {self.size[0]}x{self.size[1]}"
        extras = f"; with {', '.join(sorted(self.extras))}" if self.extras else ""
        blocks = "; ".join(f"{number} {block}" for number, block in enumerate(self.blocks))
        return (
            f"{what}, {self.dtype}, {self.micro_batches} x {self.micro_batch} samples of {inputs}: "
            f"{blocks}; {self.head}{extras}; number: {self.number}; {self.features}; {self.truth}"
        )

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of ops in it."""
        kinds = frozenset[str]().union(*(block.layer.kinds for block in self.blocks))
        said = {
            "skip": any(block.skip is not None for block in self.blocks),
            "shared parameters": self.head == "tied" or any(b.shared for b in self.blocks),
            "checkpoint": any(block.checkpoint for block in self.blocks),
            "random bits": self.draws,
            "state of the forward part": "running" in self.extras,
            "gather": self.tokens or self.head != "squares",
            "integers": self.tokens or self.head != "squares",
            "dot": self.head != "squares",
        }
        kinds |= self.features.kinds
        return kinds | {kind for kind, is_there in said.items() if is_there}

    @property
    def narrow(self) -> bool:
        """Whether it computes with 16-bit floats."""
        return self.dtype in (*NARROW, "mixed")

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return "dropout" in self.extras or self.features.draws

    @property
    def truth(self) -> Truth:
        """The label of its micro-batches; one micro-batch is exact."""
        if self.micro_batches == 1:
            return Truth.EXACT
        if self.features.mode == "independent":
            if self.micro_batch == 1 and self.features.truth >= Truth.EITHER:
                return Truth.EITHER  # a number computed from one sample's size may be unknown
            return Truth.NOISE if self.draws else Truth.EXACT
        found = max(self._base_truth, self.features.truth)
        doubtful = (
            # Inside a loop, the divisor of a loss and the loop's own draws are unknown.
            WAYS[self.features.way].loops and (self.draws or not LOSSES[self.features.loss].linear),
            # A second derivative of such a loss has another factor than the first.
            self.features.way == "with curvature" and not LOSSES[self.features.loss].linear,
            # The gradients of two losses with different factors cannot be separated afterwards.
            "early loss" in self.extras and not LOSSES[self.features.loss].linear,
            # If the samples are ambiguous, an error asks for them.
            not self.features.layout.said and (self.draws or self.features.layout.is_ambiguous),
        )
        return max(found, Truth.EITHER) if any(doubtful) else found

    @property
    def _base_truth(self) -> Truth:
        if "running" in self.extras:
            return Truth.MIXED
        return Truth.NOISE if "dropout" in self.extras else Truth.EXACT

    def like(self, *, micro_batches: int, mode: Literal["exact", "independent"]) -> RandomProgram:
        """The same program with its batch split into so many micro-batches."""
        samples = self.micro_batch * self.micro_batches
        return replace(
            self,
            micro_batches=micro_batches,
            micro_batch=samples // micro_batches,
            features=replace(self.features, mode=mode),
        )

    def widened(self) -> RandomProgram:
        """The same program in 64 bits."""
        return replace(self, dtype="f64")

    @property
    def out(self) -> Size:
        """The size of the last block's output."""
        return self.blocks[-1].layer.size if self.blocks else self.size

    @property
    def _state_dtype(self) -> Any:
        names = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
        return jnp.dtype(names.get(self.dtype, "float32"))

    @property
    def _compute_dtype(self) -> Any:
        return jnp.dtype(jnp.bfloat16) if self.dtype == "mixed" else self._state_dtype

    def params(self) -> dict[str, dict[str, np.ndarray]]:
        """The initial parameters."""
        generator = np.random.default_rng([STREAM, self.seed, 1])
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
        for number, block in enumerate(self.blocks):
            for n, insertion in self.features.behind(number):
                own = insertion.shapes(block.layer.size)
                shapes |= {f"insertion_{n}": own} if own else {}
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
        generator = np.random.default_rng([STREAM, self.seed, 2, seed])
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
        generator = np.random.default_rng([STREAM, self.seed, 4, seed])
        if "bytes" in self.features.reads:
            values = generator.integers(0, 256, (samples, self.size[0]))
            batch["bytes"] = values.astype(np.uint8)
        if "mask" in self.features.reads:
            batch["mask"] = generator.random((samples, self.size[0])) < 0.5
        return batch

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """The arguments of the first step; all but the state are those of step `seed`."""
        flag = np.int32(np.random.default_rng([STREAM, self.seed, 3, seed]).integers(FLAGS))
        key = None
        if self.training or self.draws:
            made = jax.random.key if self.features.keys.typed else _words
            key = made(self.seed % 1000 + seed)
        weights = None
        if self.features.layout.weights:
            weights = np.linspace(-1, 1, self.micro_batch * self.micro_batches, dtype=np.float32)
        state = self._state(key) if self.training else self.params()
        given = None if self.training and self.features.keys.in_state else key
        return state, *self.features.layout.packed(self.batch(seed)), weights, flag, given

    def _state(self, key: Any) -> dict[str, Any]:
        params = self.params()
        with jax.enable_x64(self.dtype == "f64"):
            opt_state = jax.tree.map(np.asarray, self._optimizer().init(params))
        state: dict[str, Any] = {"params": params, "opt": opt_state}
        if "frozen" in self.extras:
            scale = np.linspace(0.7, 1.3, self.size[1]).astype(self._state_dtype)
            state["frozen"] = {"scale": scale}
        if "average" in self.extras:
            state["average"] = jax.tree.map(lambda w: w * np.array(0.5, w.dtype), params)
        if "running" in self.extras:
            width = self.blocks[len(self.blocks) // 2].layer.size[1]
            state["running"] = np.linspace(-0.2, 0.2, width).astype(self._state_dtype)
        if self.features.states:
            width = CLASSES if self.head == "cross-entropy" else self.out[1]
            width = INDICES if self.head == "tied" else width
            state["kept"] = {
                name: STATES[name].initial(params, width, self.dtype == "f64")
                for name in self.features.states
            }
        if self.features.keys.in_state:
            state["key"] = key
        return state

    def _optimizer(self) -> Any:
        return WRAPPERS[self.features.wrapper](OPTIMIZERS[self.optimizer]())

    def outputs(self, state: Any, given: Given) -> tuple[Any, Any, Any]:
        """The outputs of the last block and the head for a batch.

        Also returns a loss of a middle block, and the running means that are state.
        """
        batch = given.batch
        dtype = self._compute_dtype
        params = jax.tree.map(lambda w: w.astype(dtype), state["params"])
        inputs = Inputs(
            indices=batch["indices"],
            flag=given.flag,
            bytes=batch.get("bytes"),
            mask=batch.get("mask"),
        )
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
            # Values of long programs neither vanish nor grow.
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 0.3)
            if number == 0 and "dropout" in self.extras:
                y = jnp.where(given.noise.keep(y.shape), y / 0.75, 0).astype(y.dtype)
            if number == len(self.blocks) // 2 and "early loss" in self.extras:
                early = 0.1 * jnp.mean(jnp.sin(y.astype(jnp.promote_types(dtype, jnp.float32))))
            if number == len(self.blocks) // 2 and running is not None:
                mean = jax.lax.stop_gradient(y).mean((0, 1)).astype(running.dtype)
                running = 0.9 * running + 0.1 * mean
                y = y - running.astype(y.dtype)
            for n, insertion in self.features.behind(number):
                own = params.get(f"insertion_{n}", {})
                y = insertion.apply(own, y, inputs, given.noise).astype(dtype)
            before[number] = x = y
            if block.boundary:
                alpa.mark_layer_boundary()
        if self.head == "cross-entropy":
            x = x @ params["head"]["w"]
        elif self.head == "tied":
            x = x @ params["embedding"]["w"].T
        if given.weights is not None:
            chosen = given.weights[batch["indices"][:, :1] % given.weights.shape[0]]
            x = x * (1 + 0.2 * chosen[..., None]).astype(x.dtype)
        return x, early, running

    def loss(self, params: Any, state: Any, given: Given) -> tuple[Any, tuple[Any, Any]]:
        """The loss of a batch, the outputs and the new running means."""
        outputs, early, running = self.outputs({**state, "params": params}, given)
        values, indices = wide(outputs), given.batch["indices"]
        if self.head == "squares":
            each = ((values - given.batch["y"].astype(values.dtype)) ** 2).mean(-1)
        else:
            labels = indices[:, np.arange(values.shape[1], dtype=np.int32) % indices.shape[1]]
            log_probabilities = jax.nn.log_softmax(values)
            chosen = jnp.take_along_axis(
                log_probabilities, (labels % values.shape[-1])[..., None], axis=-1
            )
            each = -chosen[..., 0]
        loss = LOSSES[self.features.loss].apply(each, values.mean(1), indices)
        if "number" in params:
            number = params["number"]["w"].astype(loss.dtype)
            loss = number * loss if self.number == "factor" else jnp.exp(-number) * loss + number
        return loss if early is None else loss + early, (outputs, running)

    def function(self) -> Callable[..., Any]:
        """The program itself, for plain JAX at any batch and for `alpa.parallelize`."""

        def run(state: Any, given: Given, key: Any) -> Any:
            return self._run(state, replace(given, noise=self._noise(key, [key])))

        return self._with_arguments(run)

    def reference(self) -> Callable[..., Any]:
        """Plain JAX at the whole batch, with the random numbers of its micro-batches; or a loop
        over the micro-batches if each is a batch of its own."""
        count = self.micro_batches
        if count == 1 or not (self.features.mode == "independent" or self.draws):
            return self.function()

        def run(state: Any, given: Given, key: Any) -> Any:
            keys = [key] * count
            if self.draws:
                keys = [jax.random.fold_in(key, m) for m in range(count)]
            if self.features.mode == "exact":
                return self._run(state, replace(given, noise=self._noise(key, keys)))
            parts = [
                replace(
                    given,
                    batch={
                        name: array[m * self.micro_batch : (m + 1) * self.micro_batch]
                        for name, array in given.batch.items()
                    },
                    noise=self._noise(key, [keys[m]]),
                )
                for m in range(count)
            ]
            return self._looped(state, given, parts)

        return self._with_arguments(run)

    def _with_arguments(self, run: Callable[[Any, Given, Any], Any]) -> Callable[..., Any]:
        def inner(state: Any, batch: Any, weights: Any, flag: Any, key: Any) -> Any:
            key = state["key"] if self.training and self.features.keys.in_state else key
            noise = self._noise(key, [key])
            given = Given(batch=batch, weights=weights, flag=flag, noise=noise)
            return run(state, given, key)

        return self.features.layout.function(inner)

    def _noise(self, key: Any, keys: Sequence[Any]) -> Noise:
        own = self.features.keys
        return Noise(keys=keys, shared=key, kind=own.kind, way=own.way)

    def gradients(self, state: Any, given: Given) -> Any:
        """The loss, outputs, running means and gradients of a batch."""
        gradient = alpa.value_and_grad if "marks gradients" in self.extras else jax.value_and_grad
        problem = Problem(
            loss=lambda params, batch: self.loss(params, state, replace(given, batch=batch)),
            params=state["params"],
            batch=given.batch,
            flag=given.flag,
            value_and_grad=gradient,
        )
        (loss, (outputs, running)), grads = WAYS[self.features.way].apply(problem)
        return loss, outputs, running, grads

    def update(
        self, state: Any, given: Given, outputs: Any, running: Any, loss: Any, grads: Any
    ) -> Any:
        """The state after a step."""
        optimizer, params = self._optimizer(), state["params"]
        updates, opt_state = optimizer.update(grads, state["opt"], params)
        if self.number == "rate":
            rate = loss / (1 + jnp.abs(loss))
            updates = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        new = {**state, "params": optax.apply_updates(params, updates), "opt": opt_state}
        if "guarded" in self.extras:
            finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
            pick = partial(jnp.where, finite)
            new |= {name: jax.tree.map(pick, new[name], state[name]) for name in ("params", "opt")}
        if "average" in self.extras:
            old, now = state["average"], new["params"]
            new["average"] = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, now)
        if running is not None:
            new["running"] = running
        if self.features.states:
            values = Values(
                loss=loss,
                grads=grads,
                old=params,
                new=new["params"],
                outputs=wide(outputs),
                indices=given.batch["indices"],
            )
            kept = state["kept"].items()
            new["kept"] = {name: STATES[name].update(old, values) for name, old in kept}
        if self.features.keys.in_state:
            new["key"] = given.noise.next()
        return new

    def _run(self, state: Any, given: Given) -> Any:
        """One step, or a forward pass, of a batch."""
        if not self.training:
            outputs, *_ = self.outputs({"params": state}, given)
            return outputs, self._others(state, outputs, given, None, None)
        loss, outputs, running, grads = self.gradients(state, given)
        new = self.update(state, given, outputs, running, loss, grads)
        return new, loss, self._others(state["params"], outputs, given, loss, grads)

    def _looped(self, state: Any, given: Given, parts: Sequence[Given]) -> Any:
        """One step in plain JAX that carries running means from micro-batch to micro-batch."""
        if not self.training:
            outputs = jnp.concatenate([self._run(state, part)[0] for part in parts])
            return outputs, self._others(state, outputs, given, None, None)
        now, found = state, []
        for part in parts:
            loss, outputs, running, grads = self.gradients(now, part)
            if running is not None:
                now = {**now, "running": running}
            found.append((loss, outputs, grads))
        losses, outputs, grads = zip(*found, strict=True)

        def mean(*arrays: Any) -> Any:
            wider = [wide(a) for a in arrays]
            return (jnp.stack(wider).sum(0) / len(wider)).astype(arrays[0].dtype)

        grads, loss = jax.tree.map(mean, *grads), mean(*losses)
        whole = jnp.concatenate(outputs)
        new = self.update(state, given, whole, now.get("running"), loss, grads)
        return new, loss, self._others(state["params"], whole, given, loss, grads)

    def _others(
        self, params: Any, outputs: Any, given: Given, loss: Any, grads: Any
    ) -> dict[str, Any]:
        others: dict[str, Any] = {}
        batch, flag = given.batch, given.flag
        if "outputs" in self.extras:
            others["outputs"] = outputs
        if "mean" in self.extras:
            others["mean"] = jnp.mean(wide(outputs) ** 2)
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
        if self.features.metrics:
            others["metrics"] = {
                name: METRICS[name].apply(wide(outputs), loss, params)
                for name in self.features.metrics
            }
        if self.features.keys.returned:
            others["key"] = given.noise.next()
        return others


def _words(seed: int) -> Any:
    """A random key as its two words."""
    return np.asarray(jax.random.PRNGKey(seed))
