"""Every door plans alike: the same program and options give the same planned module.

The doors are `alpa-opt`, `alpa.passes.run`, `alpa-plan` and `alpa.parallelize`. The program is the
module that `alpa.parallelize` lowers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import alpa
from alpa.dialects import ir, parse_file
from alpa.tools import alpa_opt, alpa_plan, zoo


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step, its arguments, and the planner's options by their Python names."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def planned_by_every_door(case: Case, folder: Path) -> tuple[dict[str, ir.Module], list[str]]:
    """The planned modules, and the remarks of the planner."""
    step = alpa.parallelize(case.step, **case.options)
    source, opt, command = (folder / name for name in ("step.mlir", "opt.mlir", "plan.mlir"))
    lowered = step.lower(*case.arguments).compiler_ir()
    source.write_text(lowered.operation.get_asm(enable_debug_info=True))
    names = {name.replace("_", "-"): value for name, value in case.options.items()}
    names.pop("donate-argnums", None)
    pipeline = f"alpa{{{' '.join(f'{name}={value}' for name, value in names.items())}}}"
    assert alpa_opt.main([str(source), "--pipeline", pipeline, "-o", str(opt)]) == 0
    flags = [word for name, value in names.items() for word in (f"--{name}", str(value))]
    assert alpa_plan.main([str(source), *flags, "-o", str(command)]) == 0
    remarks: list[str] = []

    def remark(_: ir.Location, message: str) -> None:
        remarks.append(message)

    modules = {
        "alpa.passes.run": alpa.passes.run(source.read_text(), pipeline, on_remark=remark),
        "alpa-opt": parse_file(opt),
        "alpa-plan": parse_file(command),
        "alpa.parallelize": step.plan(*case.arguments).module,
    }
    return modules, remarks


def check(case: Case, folder: Path) -> list[str]:
    modules, remarks = planned_by_every_door(case, folder)
    texts = {
        name: module.operation.get_asm(enable_debug_info=False) for name, module in modules.items()
    }
    first = texts.pop("alpa.passes.run")
    assert "alpa.solver" in first
    assert {name for name, text in texts.items() if text != first} == set()
    return remarks


def zoo_case(name: str, changes: dict[str, Any] | None = None, **options: Any) -> Case:
    program = zoo.get(name, optimizer="sgd", **(changes or {}))
    state = jax.eval_shape(lambda: program.init_state(0))
    given = {"cluster": "cpu:1x4", "num_micro_batches": 2, "donate_argnums": 0}
    return Case(
        step=program.train_step,
        arguments=(state, program.random_batch(1, 8)),
        options=given | options,
    )


def test_a_model_of_the_zoo(tmp_path: Path) -> None:
    check(zoo_case("gpt-tiny", {"num_layers": 1}, cluster="cpu:1x2"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "moe", "t5", "unet", "llama"])
def test_the_zoo(family: str, tmp_path: Path) -> None:
    check(zoo_case(f"{family}-tiny"), tmp_path)


@pytest.mark.slow
def test_the_zoos_batch_statistics(tmp_path: Path) -> None:
    check(zoo_case("wresnet-tiny", micro_batches="independent"), tmp_path)


class Classifier(nn.Module):
    """A convolution, a layer norm and a dense layer."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.LayerNorm()(nn.relu(nn.Conv(8, (3, 3))(images)))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def test_a_model_of_equinox(tmp_path: Path) -> None:
    optimizer = optax.adam(1e-2)

    def step(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = eqx.nn.MLP(2, 1, width_size=64, depth=2, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    x, y = np.zeros((64, 2), np.float32), np.zeros((64, 1), np.float32)
    options = {"cluster": "cpu:1x4", "num_micro_batches": 2, "schedule": "1f1b"}
    check(Case(step=step, arguments=(model, opt_state, x, y), options=options), tmp_path)


def test_a_model_of_flax(tmp_path: Path) -> None:
    def step(state: TrainState, images: Any, labels: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    images, labels = np.zeros((8, 8, 8, 1), np.float32), np.zeros(8, np.int32)
    params = Classifier().init(jax.random.key(0), images)["params"]
    state = TrainState.create(apply_fn=Classifier().apply, params=params, tx=optax.adamw(1e-3))
    options = {"cluster": "cpu:1x2", "num_micro_batches": 4, "donate_argnums": 0}
    check(Case(step=step, arguments=(state, images, labels), options=options), tmp_path)


@pytest.mark.usefixtures("low_estimates")
def test_a_program_that_fits_after_a_second_cut(
    tmp_path: Path, small_cluster: Callable[..., Path]
) -> None:
    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            h = x
            for number, w in enumerate(params):
                if number:
                    alpa.mark_layer_boundary()
                h = jax.nn.softmax(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss_fn)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((6 * 256, 128), jnp.float32)
    options = {
        "cluster": str(small_cluster("4155KiB", devices=2)),
        "num_micro_batches": 6,
        "donate_argnums": 0,
        "schedule": "gpipe",
        "mesh_shape": "1",
    }
    remarks = check(Case(step=step, arguments=(params, x), options=options), tmp_path)
    assert any("stages are cut again with reserve=" in remark for remark in remarks)
