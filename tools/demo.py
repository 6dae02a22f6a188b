"""Parallelises a training step, runs it on virtual CPU devices, and compares it with plain JAX.

    python -m alpa.tools.demo
    python -m alpa.tools.demo --executor ray --steps 24
    python -m alpa.tools.demo moe-tiny --cluster cpu:1x4 --num-stages auto --optimizer adam

Both sides start from the same state and see the same batches: two random ones in turn, so that the
loss falls. The rule for "equal" depends on the optimizer. Parallel sums differ in their last bits,
and Adam divides by the root of a gradient's square, which amplifies the difference:

* sgd: `max|a-b| <= 1e-4 max|ref|` for each loss and each tensor of the state after the last step;
  2e-2 if the model computes in 16 bits.
* adam, adamw-clip: the same for the losses; each tensor of the state is at most 4 times as far from
  a run in 64 bits as plain JAX is.

Plain JAX runs one step at the whole batch. If the forward pass writes state or draws random
numbers, plain JAX loops over the micro-batches, as the plan does.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

if __name__ == "__main__":
    # XLA warns about inefficient layout changes, which a user of the demo cannot fix. It reads this
    # variable when jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from alpa import passes, runtime
from alpa.dialects import ir, main_function, parse
from alpa.passes import PassError
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.pipelines.text import element_text
from alpa.passes.plan.table import plan_table
from alpa.runtime.dtypes import numpy_dtype
from alpa.runtime.pjrt import Compiled, compile_module
from alpa.runtime.reference import compare
from alpa.runtime.widen import widened
from alpa.tools import zoo
from alpa.tools.arguments import count, count_or_auto
from alpa.tools.devices import DevicesError, make_devices
from alpa.tools.interrupts import until_interrupted
from alpa.tools.zoo import TrainingProgram, TrainState

# A GPT of 3.1 million parameters: large enough for a plan, small enough for a laptop.
_DEFAULT = "gpt-3m"
GPT_3M = {
    "num_layers": 6,
    "hidden_size": 192,
    "num_heads": 6,
    "vocab_size": 2048,
    "sequence_length": 64,
}
_ADAPTIVE = 4  # times the distance of plain JAX to the run in 64 bits
_EPSILON = float(np.finfo(np.float32).eps)
_EXAMPLES = f"""\
models: {_DEFAULT}, and those of python -m alpa.tools.zoo --list

examples:
  python -m alpa.tools.demo
  python -m alpa.tools.demo --executor ray --steps 24
  python -m alpa.tools.demo moe-tiny --cluster cpu:1x4 --num-stages auto --optimizer adam
"""

Step = Callable[[Any, Any], tuple[TrainState, Any]]


class DemoError(ValueError):
    """The demo cannot run. The message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor after the last step: its error, and its bound."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """The error as a share of its bound."""
        if not self.error:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The losses of each step and the state after the last one."""

    losses: list[float]
    state: TrainState


def model(name: str, optimizer: str) -> TrainingProgram:
    """A zoo program, or the demo's own.

    Raises:
        DemoError: there is none of that name; lists the nearest names.
    """
    if name == _DEFAULT:
        return zoo.get("gpt-tiny", optimizer=optimizer, **GPT_3M)
    known = [_DEFAULT, *zoo.names()]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known) or known)
        raise DemoError(f"no model is called {name!r}; try {near}")
    return zoo.get(name, optimizer=optimizer)


def random_inputs(program: TrainingProgram) -> set[str]:
    """The names of its random keys."""
    return {name for name, entry in program.config.inputs().items() if entry.role == "key"}


def planned_step(program: TrainingProgram, executable: runtime.Executable) -> Step:
    """The planned step with the signature of the program's own."""
    structure = jax.tree.structure(program.state_shapes())

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        *leaves, loss = executable(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(structure, leaves), loss

    return step


def reference_step(program: TrainingProgram, batches: int) -> Step:
    """The reference for the plan, in plain JAX."""
    keys = random_inputs(program)
    if batches == 1 or not (keys or jax.tree.leaves(program.state_shapes().model_state)):
        return program.train_step

    def step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Any]:
        fixed = {name: batch[name] for name in keys}
        split = {
            name: array.reshape(batches, -1, *array.shape[1:])
            for name, array in batch.items()
            if name not in keys
        }
        value_and_grad = jax.value_and_grad(program.loss, has_aux=True)

        def micro_batch(carry: Any, part: Any) -> tuple[Any, None]:
            model_state, total, sums = carry
            (loss, model_state), grads = value_and_grad(
                state.params, model_state, {**part, **fixed}
            )
            return (model_state, total + loss, jax.tree.map(jnp.add, sums, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        start = (state.model_state, jnp.zeros(()), zeros)
        (model_state, total, sums), _ = jax.lax.scan(micro_batch, start, split)
        grads = jax.tree.map(lambda g: g / batches, sums)
        updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, model_state), total / batches

    return step


def widened_step(step: Step, state: TrainState, batch: Any) -> Step:
    """A step that computes in 64 bits without rounding in between."""
    structure = jax.tree.structure(state)
    traced = jax.jit(step, keep_unused=True).trace(state, batch)
    module = widened(cast(ir.Module, traced.lower().compiler_ir("stablehlo")))
    device = jax.devices()[0]
    types = [ir.RankedTensorType(type_) for type_ in main_function(module).type.inputs]
    results = [ir.RankedTensorType(type_) for type_ in main_function(module).type.results]
    dtypes = [numpy_dtype(str(type_.element_type)) for type_ in types]
    sharding = SingleDeviceSharding(device)
    compiled: Compiled = compile_module(
        module, [device], [(tuple(type_.shape), sharding) for type_ in results]
    )

    def run(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        leaves = zip(jax.tree.leaves((state, batch)), dtypes, strict=True)
        with jax.enable_x64(True):
            arrays = [jax.device_put(np.asarray(leaf, dtype), device) for leaf, dtype in leaves]
            *new, loss = compiled(arrays)
        return jax.tree.unflatten(structure, new), loss

    return run


def run(name: str, step: Step, state: TrainState, batches: Sequence[Any], steps: int) -> Run:
    """Runs some steps; the batches alternate."""
    losses: list[float] = []
    for number in range(steps):
        with _doing(f"{name}, step {number + 1} of {steps}"):
            state, loss = step(state, batches[number % len(batches)])
            losses.append(float(loss))
    return Run(losses=losses, state=jax.tree.map(np.asarray, state))


def loss_rows(run: Run, reference: Run, dtype: str) -> list[Row]:
    """Compares the losses by the bound of the model's type."""
    a, b = (list(np.asarray(losses, np.float32)) for losses in (run.losses, reference.losses))
    rows = compare(a, b, dtype)
    return [Row(name=f"loss {r.index + 1}", error=r.error, bound=r.bound) for r in rows]


def state_rows(run: Run, reference: Run, exact: Run | None, dtype: str) -> list[Row]:
    """Compares the tensors of the state by their size, or by the distance to the exact run."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(run.state)]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    results, plain = jax.tree.leaves(run.state), jax.tree.leaves(reference.state)
    if exact is None:
        rows = compare(results, plain, dtype)
        return [Row(name=names[r.index], error=r.error, bound=r.bound) for r in rows]
    rows = []
    for name, a, b, truth in zip(names, results, plain, jax.tree.leaves(exact.state), strict=True):
        floor = _EPSILON * float(np.max(np.abs(truth), initial=0)) if a.dtype.kind == "f" else 0
        bound = _ADAPTIVE * max(_distance(b, truth), floor)
        rows.append(Row(name=name, error=_distance(a, truth), bound=bound))
    return rows


def _distance(array: Any, truth: Any) -> float:
    wide = np.asarray(truth, np.float64)
    return float(np.max(np.abs(np.asarray(array, np.float64) - wide), initial=0))


def _plan(program: TrainingProgram, options: argparse.Namespace) -> ir.Module:
    """The planned module."""
    given = {
        "cluster": options.cluster,
        "num-micro-batches": options.num_micro_batches,
        "num-layers": options.num_layers,
        "num-stages": options.num_stages,
    }
    with _doing("lowering"):
        module = parse(program.lower(options.micro_batch_size))
    return passes.run(module, element_text("alpa", given), on_pass=_doing)


def _demo(options: argparse.Namespace) -> bool:
    """Whether the planned program and plain JAX agree."""
    program = model(options.model, options.optimizer)
    if options.optimizer != "sgd" and random_inputs(program):
        # Random floats are made from bits, which do not widen.
        raise DemoError(
            f"{options.model} draws random numbers, so there is no run in 64 bits to judge "
            f"{options.optimizer} by; use --optimizer sgd"
        )
    num_devices = _num_devices(options.cluster)
    _check_memory(program, num_devices)
    make_devices(num_devices)
    batches, size = options.num_micro_batches, options.micro_batch_size
    print(
        f"{options.model}: {program.num_parameters():,} parameters, {options.optimizer}, "
        f"{batches} micro-batches of {size} samples, {num_devices} virtual CPU devices\n"
    )
    module = _plan(program, options)
    print(plan_table(module), flush=True)
    with _doing("compiling the stages"):
        executable = runtime.load(module, options.executor)

    state = program.init_state(0)
    data = [program.random_batch(seed, batches * size) for seed in (1, 2)]
    reference = reference_step(program, batches)
    looped = reference != program.train_step
    # The plan donates its state, so it gets a copy.
    start = jax.tree.map(np.asarray, state)
    ours = run("the plan", planned_step(program, executable), start, data, options.steps)
    plain = run("plain JAX", jax.jit(reference), state, data, options.steps)
    exact = None
    if options.optimizer != "sgd":
        with _doing("compiling for 64 bits"):
            wide = widened_step(reference, state, data[0])
        exact = run("plain JAX in 64 bits", wide, state, data, options.steps)

    dtype = np.dtype(getattr(program.config, "dtype", np.float32)).name
    losses = loss_rows(ours, plain, dtype)
    states = state_rows(ours, plain, exact, dtype)
    _print_losses(ours, plain, losses, looped=looped)
    return _print_verdict(losses, states, dtype, adaptive=exact is not None)


def _num_devices(cluster: str) -> int:
    try:
        return Cluster.parse(cluster).num_devices
    except ClusterError as error:
        raise DemoError(str(error)) from error


def _check_memory(program: TrainingProgram, num_devices: int) -> None:
    """Raises DemoError if replicas on every device would not fit on this machine."""
    leaves = jax.tree.leaves(program.state_shapes())
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = size * (num_devices + 3)  # plus the start, the gradients and plain JAX's state
    if needed > memory:
        raise DemoError(
            f"{program.name} has {size / 2**30:.1f} GiB of state, up to {needed / 2**30:.0f} GiB "
            f"on {num_devices} devices in one machine that has {memory / 2**30:.0f} GiB; use a "
            f"smaller model, such as {_DEFAULT}, or only plan it with alpa-opt"
        )


def _print_losses(ours: Run, plain: Run, rows: Sequence[Row], *, looped: bool) -> None:
    reference = "plain JAX by micro-batches" if looped else "plain JAX"
    print(f"{'step':>4}  {'loss of the plan':>16}  {reference:>16}  {'difference':>10}")
    for number, row in enumerate(rows):
        a, b = ours.losses[number], plain.losses[number]
        mark = "" if row.ok else "  DIFFERS"
        print(
            f"{number + 1:>4}  {a:>16.6f}  {b:>{max(16, len(reference))}.6f}  "
            f"{row.error:>10.1e}{mark}"
        )


def _print_verdict(
    losses: Sequence[Row], states: Sequence[Row], dtype: str, *, adaptive: bool
) -> bool:
    relative = "2e-2" if dtype in ("bfloat16", "float16") else "1e-4"
    rule = f"max|a-b| <= {relative} max|ref|"
    if adaptive:
        print(
            f"\nrule for losses: {rule}\nrule for the state: at most {_ADAPTIVE} times as far "
            "from a run in 64 bits as plain JAX"
        )
    else:
        print(f"\nrule for losses and the state: {rule}")
    parameters = [row for row in states if row.name.startswith("params/")]
    worst = max(parameters, key=lambda row: row.share)
    print(
        f"largest parameter difference: {worst.error:.1e} of at most {worst.bound:.1e} "
        f"({worst.share:.0%}), in {worst.name.removeprefix('params/')}"
    )
    wrong = [row for row in (*losses, *states) if not row.ok]
    for row in wrong[:10]:
        print(f"  {row.name} is off by {row.error:.1e}, allowed are {row.bound:.1e}")
    what = f"{len(losses)} losses and {len(states)} tensors of the state"
    if wrong:
        print(f"DIFFERENT: {len(wrong)} of {what}")
    else:
        print(f"EQUAL: all {what}, of them {len(parameters)} parameters")
    return not wrong


@contextmanager
def _doing(what: str) -> Generator[None]:
    """Prints on a terminal what is being done, then how long it took."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    done = False
    try:
        yield
        done = True
    finally:
        if shown:
            end = f" {time.perf_counter() - start:.1f} s" if done else ""
            print(end, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.demo",
        description="Parallelises a training step, runs it on virtual CPU devices, in this "
        "process or in Ray actors, and compares losses and parameters with plain JAX. The exit "
        "status is 0 if they are equal, else 1.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default=_DEFAULT, metavar="MODEL")
    add = partial(parser.add_argument, metavar="N")
    add("--cluster", metavar="C", default="cpu:2x4", help="hosts x devices; default: %(default)s")
    add("--num-micro-batches", type=count, default=4, help="per step; default: %(default)s")
    add("--micro-batch-size", type=count, default=4, help="samples; default: %(default)s")
    add("--num-layers", type=count_or_auto, default="auto", help="default: %(default)s")
    add(
        "--num-stages",
        type=count_or_auto,
        default=2,
        help="pipeline stages, or auto: the fastest plan found; default: %(default)s",
    )
    add("--steps", type=count, default=5, help="default: %(default)s")
    parser.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="local: all meshes in this process; ray: each in an actor; default: %(default)s",
    )
    parser.add_argument("--optimizer", choices=zoo.OPTIMIZERS, default="sgd", help="default: sgd")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 if the plan's results match plain JAX."""
    options = _parser().parse_args(arguments)
    try:
        return 0 if _demo(options) else 1
    except ir.MLIRError as error:
        # The places refer to generated text that the user does not have.
        messages = [diagnostic.message for diagnostic in error.error_diagnostics]
        message = "\n".join(messages) or error.message
    except PassError as error:
        message = error.message
    except (
        DemoError,
        DevicesError,
        runtime.LoadError,
        runtime.ClusterSizeError,
        runtime.WorkerError,
    ) as error:
        message = str(error)
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(until_interrupted("demo", main))
