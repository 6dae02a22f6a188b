"""A Keras 3 model with dropout, trained by Keras' Adam on two meshes of virtual CPU devices.

    python examples/keras_mlp.py

A step takes all variables as arguments and returns their new values: Keras' `stateless_call` and
`stateless_apply` do this for a model and an optimizer. The step also works with `jax.jit`.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # Before the import of Keras.

from typing import Any

import jax
import keras
import numpy as np

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before Keras creates its first array.

FEATURES, CLASSES, WIDTH = 8, 4, 32


def new_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((FEATURES,))
    # Layer norm, because batch norm mixes the samples of a batch: with several micro-batches, it
    # needs `micro_batches="independent"`, which makes each micro-batch a batch of its own.
    for _ in range(2):
        x = keras.layers.Dense(WIDTH, activation="gelu")(x)
        x = keras.layers.Dropout(0.1)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


model = new_model()
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-2)
optimizer.build(model.trainable_variables)


@alpa.parallelize(cluster="cpu:2x2", num_micro_batches=2, num_stages=2, donate_argnums=0)
def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        # The variables that are not trained are the seeds of dropout: each call advances them.
        logits, seeds = model.stateless_call(
            params, state["non_trainable"], batch["x"], training=True
        )
        return loss_of(batch["label"], logits), seeds

    (loss, seeds), grads = alpa.value_and_grad(loss_fn, has_aux=True)(state["trainable"])
    params, moments = optimizer.stateless_apply(state["optimizer"], grads, state["trainable"])
    return {"trainable": params, "non_trainable": seeds, "optimizer": moments}, loss


def variables() -> dict[str, list[keras.Variable]]:
    return {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": optimizer.variables,
    }


def main() -> None:
    x = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)
    batch = {"x": x, "label": np.argmax(x[:, :CLASSES], axis=1)}
    state = jax.tree.map(lambda variable: variable.value, variables())
    report = alpa.compare_with_jax(train_step, state, batch)
    print(report.summary())
    assert not report.is_fault
    for number in range(10):
        state, loss = train_step(state, batch)
        print(f"step {number}: loss {float(loss):.4f}")
    # The steps have donated the arrays of the variables. Keras computes on one device, and the
    # state lies on the devices of two meshes.
    jax.tree.map(lambda variable, value: variable.assign(value), variables(), jax.device_get(state))
    right = np.argmax(model.predict(x, verbose=0), axis=1) == batch["label"]
    print(f"{right.sum()} of {right.size} right")


if __name__ == "__main__":
    main()
