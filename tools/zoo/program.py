"""A training program: a model, an optimizer and a description of a batch, lowered by shapes alone.

The lowered module is valid compiler input: every argument of `@main` has an `alpa.role`, every
result an `alpa.result`, and each state argument is donated to its new value.

    func.func public @main(%arg0: tensor<f32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
                           %arg1: tensor<8x4xi32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<f32> {alpa.result = "state:0"}, tensor<f32> {alpa.result = "mean"})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import (
    INDEPENDENT,
    MICRO_BATCHES,
    Argument,
    Result,
    ResultRole,
    write_interface,
)
from alpa.passes.analysis.micro_batches.resize import resize
from alpa.passes.simplify.gradients import mark_gradients
from alpa.passes.simplify.inline import inline_calls

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One entry of a batch.

    `shape` is that of one sample for the role "batch", the whole shape for "key". Integers lie in
    [0, below). An input with the role "key" feeds the random stream of its name in the model.
    """

    shape: tuple[int, ...] = ()
    dtype: type = np.float32
    below: int | None = None
    role: Literal["batch", "key"] = "batch"

    def struct(self, batch_size: int) -> jax.ShapeDtypeStruct:
        shape = (batch_size, *self.shape) if self.role == "batch" else self.shape
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def sample(self, rng: np.random.Generator, batch_size: int) -> jax.Array:
        shape = self.struct(batch_size).shape
        if np.issubdtype(self.dtype, np.integer):
            below = np.iinfo(self.dtype).max if self.below is None else self.below
            return jnp.asarray(rng.integers(below, size=shape, dtype=self.dtype))
        return jnp.asarray(rng.standard_normal(shape).astype(self.dtype))


KEY = Input(shape=(2,), dtype=np.uint32, role="key")


class ModelConfig(Protocol):
    """The interface of a family's configuration; its fields define the model."""

    @property
    def global_batch_size(self) -> int:
        """Samples per step in the experiments of the source."""
        ...

    def model(self) -> nn.Module:
        """A module whose method `loss(**batch)` returns the mean loss, a scalar in f32."""
        ...

    def inputs(self) -> Mapping[str, Input]:
        """The batch, by name."""
        ...


class TrainState(NamedTuple):
    """The state that a step reads and replaces. The forward pass writes `model_state`."""

    params: Any
    opt_state: Any
    model_state: Any


@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """A training step of one model, at any batch size."""

    name: str
    config: ModelConfig
    optimizer: optax.GradientTransformation

    @property
    def global_batch_size(self) -> int:
        return self.config.global_batch_size

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        """Runs one step; returns the new state and the mean loss over the batch."""
        value_and_grad = jax.value_and_grad(self.loss, has_aux=True)
        (loss, model_state), grads = value_and_grad(state.params, state.model_state, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, model_state), loss

    def loss(self, params: Any, model_state: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """The mean loss over the batch, and the new model state."""
        loss, model_state = self.config.model().apply(
            {"params": params, **model_state},
            **{name: batch[name] for name in self._names("batch")},
            rngs={name: batch[name] for name in self._names("key")},
            mutable=list(model_state),
            method="loss",
        )
        return cast(jax.Array, loss), model_state

    def state_shapes(self) -> TrainState:
        """The state, as shapes."""
        variables = {**self._variable_shapes}
        params = variables.pop("params")
        return TrainState(params, jax.eval_shape(self.optimizer.init, params), variables)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of that many samples, as shapes."""
        if batch_size < 1:
            raise ValueError(f"{self.name}: a batch holds at least 1 sample, got {batch_size}")
        return {name: entry.struct(batch_size) for name, entry in self.config.inputs().items()}

    def num_parameters(self) -> int:
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(self._variable_shapes["params"]))

    def init_state(self, seed: int = 0) -> TrainState:
        """A random state to start from, drawn by numpy: XLA compiles many random tensors slowly."""
        rng = np.random.default_rng(seed)
        shapes = self.state_shapes()
        draw = partial(_initial, rng)
        params = jax.tree_util.tree_map_with_path(draw, shapes.params)
        model_state = jax.tree_util.tree_map_with_path(draw, shapes.model_state)
        return TrainState(params, jax.jit(self.optimizer.init)(params), model_state)

    def random_batch(self, seed: int, batch_size: int) -> Batch:
        """Standard normal numbers, and integers within their range."""
        self.batch_shapes(batch_size)  # refuses an empty batch
        rng = np.random.default_rng(seed)
        return {name: i.sample(rng, batch_size) for name, i in self.config.inputs().items()}

    def lower(self, micro_batch_size: int, *, locations: bool = False) -> str:
        """Returns the step at this micro-batch size as StableHLO text.

        `locations` has the names of JAX and the lines of the model; they take time to read.

        It is lowered for CPU on every machine, without the custom calls of other platforms (random
        bits on GPUs). The step for one sample is derived from those for two and four, because JAX
        hides a dimension of size 1.
        """
        module = self._lowered(micro_batch_size if micro_batch_size != 1 else 2)
        if micro_batch_size == 1:
            larger = self._lowered(4)
            resize(main_function(module), main_function(larger), (2, 4), 1)
        return cast(str, module.operation.get_asm(enable_debug_info=locations))

    def _lowered(self, micro_batch_size: int) -> ir.Module:
        state, batch = self.state_shapes(), self.batch_shapes(micro_batch_size)
        step = jax.jit(self.train_step, donate_argnums=0, keep_unused=True)
        lowered = step.trace(state, batch).lower(lowering_platforms=("cpu",))
        module = cast(ir.Module, lowered.compiler_ir("stablehlo"))
        with module.context:
            # The names that identify gradients are in the locations.
            inline_calls(module, main_function(module))
            mark_gradients(body(main_function(module)))
        self._write_roles(module, num_state=len(jax.tree.leaves(state)))
        return module

    def _write_roles(self, module: ir.Module, *, num_state: int) -> None:
        """(state, batch) -> (state, loss), flattened: the batch in the order of its names."""
        arguments = [Argument(role="state", aliasing_output=n) for n in range(num_state)]
        for _, entry in sorted(self.config.inputs().items()):
            batch_dim = 0 if entry.role == "batch" else None
            arguments.append(Argument(role=entry.role, batch_dim=batch_dim))
        results = [Result(role=ResultRole("state", n)) for n in range(num_state)]
        results.append(Result(role=ResultRole("mean")))
        with module.context:
            write_interface(main_function(module), arguments, results)
            if self.state_shapes().model_state or self._names("key"):
                # Batch norms: each micro-batch has its own statistics, as in their papers. A key is
                # an ordinary argument here: each micro-batch draws the same numbers from it.
                mode = ir.StringAttr.get(INDEPENDENT)
                module.operation.attributes[MICRO_BATCHES] = mode

    @cached_property
    def _variable_shapes(self) -> Mapping[str, Any]:
        """Flax's variables: the parameters, and each collection of the model state."""
        batch = self.batch_shapes(1)
        key = jax.eval_shape(jax.random.key, 0)
        rngs = dict.fromkeys(["params", *self._names("key")], key)
        arguments = {name: batch[name] for name in self._names("batch")}
        init = partial(self.config.model().init, method="loss")
        return jax.eval_shape(init, rngs, **arguments)

    def _names(self, role: str) -> list[str]:
        return [name for name, entry in self.config.inputs().items() if entry.role == role]


def _initial(
    rng: np.random.Generator, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Zero or one by flax's names for what starts so, else normal with the variance 1 / fan-in."""
    match path[-1].key:
        case "bias" | "mean":
            return jnp.zeros(leaf.shape, leaf.dtype)
        case "scale" | "var":
            return jnp.ones(leaf.shape, leaf.dtype)
        case _:
            deviation = prod(leaf.shape[:-1]) ** -0.5
            return jnp.asarray(deviation * rng.standard_normal(leaf.shape), leaf.dtype)
