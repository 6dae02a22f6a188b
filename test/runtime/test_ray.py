"""Plans on Ray actors compute what plain NumPy does, or report why they cannot."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import alpa.passes
import alpa.runtime
from alpa.dialects.plan import Schedule
from alpa.runtime import ClusterSizeError, WorkerError, WorkerOptions
from alpa.runtime.workers.remote_array import RemoteArray

pytestmark = pytest.mark.usefixtures("ray_cluster")

# Two layers with squared outputs as the loss.
STEP = """
func.func public @main(
    %w0: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %w1: tensor<16x64xf32> {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}, tensor<16x64xf32> {alpa.result = "state:1"},
        tensor<f32> {alpa.result = "mean"}, tensor<8x64xf32> {alpa.result = "concat:0"}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %h1 = stablehlo.custom_call @alpa.layer_boundary(%h)
    : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %y = stablehlo.dot_general %h1, %w1, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x64xf32>) -> tensor<8x64xf32>
  %square = stablehlo.multiply %y, %y : tensor<8x64xf32>
  %loss = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [0, 1]
    : (tensor<8x64xf32>, tensor<f32>) -> tensor<f32>
  %dw1 = stablehlo.dot_general %h, %y, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x64xf32>) -> tensor<16x64xf32>
  %dh = stablehlo.dot_general %y, %w1, contracting_dims = [1] x [1]
    : (tensor<8x64xf32>, tensor<16x64xf32>) -> tensor<8x16xf32>
  %dh1 = stablehlo.custom_call @alpa.layer_boundary(%dh)
    : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %dw0 = stablehlo.dot_general %x, %dh1, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %r0 = stablehlo.constant dense<1.0e-3> : tensor<16x16xf32>
  %r1 = stablehlo.constant dense<1.0e-3> : tensor<16x64xf32>
  %s0 = stablehlo.multiply %dw0, %r0 : tensor<16x16xf32>
  %s1 = stablehlo.multiply %dw1, %r1 : tensor<16x64xf32>
  %n0 = stablehlo.subtract %w0, %s0 : tensor<16x16xf32>
  %n1 = stablehlo.subtract %w1, %s1 : tensor<16x64xf32>
  return %n0, %n1, %loss, %y
    : tensor<16x16xf32>, tensor<16x64xf32>, tensor<f32>, tensor<8x64xf32>
}
"""


def planned(schedule: Schedule) -> str:
    options = "cluster=cpu:1x4 num-layers=2 num-stages=2 num-micro-batches=4"
    return str(alpa.passes.run(STEP, f"alpa{{{options} schedule={schedule}}}"))


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = (16, 16), (16, 64), (32, 16)
    return [generator.normal(size=shape).astype(np.float32) / 4 for shape in shapes]


def reference(w0: Any, w1: Any, x: Any) -> list[np.ndarray]:
    y = x @ w0 @ w1
    losses = [np.sum(part * part) for part in np.split(y, 4)]
    dw0, dw1 = x.T @ (y @ w1.T) / 4, (x @ w0).T @ y / 4
    return [w0 - 1e-3 * dw0, w1 - 1e-3 * dw1, np.mean(losses), y]


def assert_close(results: Any, expected: Any) -> None:
    for result, it in zip(results, expected, strict=True):
        assert np.max(np.abs(np.asarray(result) - it)) <= 1e-4 * np.max(np.abs(it))


# Each starts two workers, which takes 5 s of CPU. The local executor runs the same instructions.
@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        pytest.param("gpipe", marks=pytest.mark.slow),
        pytest.param("zb-h1", marks=pytest.mark.slow),
    ],
)
def test_training_steps_on_two_meshes(schedule: Schedule, tmp_path: Path) -> None:
    workers = WorkerOptions(cache_directory=str(tmp_path), timeout_seconds=300)
    with alpa.runtime.load(planned(schedule), executor="ray", workers=workers) as step:
        sizes = [len(mesh.devices) for mesh in step.program.meshes]
        assert sizes == [2, 2]
        given = arguments()
        results, expected = step(*given), reference(*given)
        for _ in range(2):
            state = results[:2]
            results = step(*state, given[2])
            assert all(array.is_deleted() for array in state)
            with pytest.raises(RuntimeError, match=r"deleted with shape=float32.*donated"):
                np.asarray(state[0])
            expected = reference(*expected[:2], given[2])
        assert_close(results, expected)
        assert_close(given, arguments())
        # Parameters, loss and predictions of the last step are all that is held.
        held = sum(step.held_bytes().values())
        assert held >= 4 * (16 * 16 + 16 * 64 + 1 + 32 * 64)
        step(*results[:2], given[2])
        del results
        assert sum(step.held_bytes().values()) < held
        assert len(list(tmp_path.iterdir())) == len(step.stages)
        name = next(iter(step.stages))
        assert "HloModule" in step.stages[name].hlo_text()
        assert step.stages[name].memory().argument_size_in_bytes > 0


def test_values_that_move_in_every_way(moves: str) -> None:
    """Results behave as arrays, and a plan whose worker dies reports it."""
    generator = np.random.default_rng(0)
    c, p, k, x = (generator.normal(size=n).astype(np.float32) for n in (4, 4, 4, 12))
    workers = WorkerOptions(cache_directory=None, transport="tcp", timeout_seconds=300)
    step = alpa.runtime.load(moves, executor="ray", workers=workers)
    assert step.transport == "TCP (transport=tcp)"
    local = alpa.runtime.load(moves)
    expected = local(*local(c, p, k, x)[:2], k, x)
    results = step(*step(c, p, k, x)[:2], k, x)
    for result, it in zip(results, expected, strict=True):
        assert isinstance(result, RemoteArray)
        assert (result.shape, result.dtype) == (it.shape, it.dtype)
        np.testing.assert_array_equal(result, it)
    check_array_likeness(results[3], x)
    with pytest.raises(ValueError, match=r"argument 3 is float32\[4\]; expected float32\[12\]"):
        step(c, p, k, x[:4])
    with pytest.raises(TypeError, match="takes 4 arguments, 1 were given"):
        step(c)
    ray.kill(step._group._actors[1])
    with pytest.raises(WorkerError, match="mesh_1 on host 0"):
        np.asarray(step(c, p, k, x)[0])
    with pytest.raises(WorkerError, match="stopped, load it again: mesh_1 on host 0"):
        step(c, p, k, x)


def test_a_state_from_the_executable_of_another_worker(moves: str) -> None:
    """As in a mesh over several hosts with GPUs, whose first worker compiles."""
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    with alpa.runtime.load(moves, executor="ray", workers=workers) as step:
        group, mesh, positions = step._group, "mesh_1", [1, 2]
        places = [step.program.arguments[p].value for p in positions]
        assert {step.program.values[value].mesh for value in places} == {mesh}
        module = step._lowered(lambda: [jnp.arange(4.0), jnp.ones(4)], mesh, positions)
        assert group.compile_creation(mesh, step._loaded, positions, module) is None  # on CPU
        compiled = group.call(mesh, "compile_creation", step._loaded, positions, module).wait()[0]
        number = group.next_number()
        # With the executable, the module is not compiled.
        other = step._lowered(lambda: [jnp.zeros(4), jnp.zeros(4)], mesh, positions)
        group.call(mesh, "create", step._loaded, number, positions, other, compiled).wait()
        shards = group.call(mesh, "fetch", (number, 2)).wait()[0]
        assert sum(len(part) for _, part in shards) == 4
        assert all((part == 1).all() for _, part in shards)


def check_array_likeness(array: RemoteArray, x: np.ndarray) -> None:
    assert repr(array) == "RemoteArray(float32[12] on mesh_0)"
    assert (array.ndim, array.size, array.nbytes, len(array)) == (1, 12, 48, 12)
    assert str(array) == str(x)
    assert f"{array[3]:.2f}" == f"{x[3]:.2f}"
    np.testing.assert_array_equal(jax.device_get({"a": array})["a"], x)
    np.testing.assert_array_equal(jnp.asarray(array) + 1, x + 1)
    assert jax.block_until_ready(array) is array
    assert array.is_ready()
    assert isinstance(array, jax.Array)
    assert eqx.is_array(array)
    assert jax.eval_shape(jnp.mean, array).shape == ()
    for mean in (jnp.mean(array), array.mean(), jax.jit(jnp.mean)(array), np.mean(array)):
        assert float(mean) == pytest.approx(x.mean(), rel=1e-5)
    np.testing.assert_array_equal(array.at[0].set(1)[1:], x[1:])
    np.testing.assert_array_equal(jax.tree.map(jnp.add, [array], [array])[0], x + x)
    for copied in (copy.deepcopy(array), pickle.loads(pickle.dumps(array)), jax.device_put(array)):
        assert not isinstance(copied, RemoteArray)
        np.testing.assert_array_equal(copied, x)
    lies = r"RemoteArray float32\[12\] has no `sharding`: it lies in the workers of mesh_0"
    with pytest.raises(AttributeError, match=lies):
        array.sharding  # noqa: B018
    array.delete()
    for use in (jax.block_until_ready, jnp.mean, jax.jit(jnp.mean)):
        with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[12\]"):
            use(array)


def on_three_hosts(moves: str) -> str:
    """The larger mesh on two hosts of its own."""
    ends = "devices = array<i64: 1, 2>"
    return moves.replace(f"hosts = array<i64: 0>, {ends}", f"hosts = array<i64: 1, 2>, {ends}")


def test_a_mesh_over_two_hosts(moves: str) -> None:
    several = on_three_hosts(moves)
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    if jax.__version_info__ < (0, 12):
        with pytest.raises(ValueError, match=r"mesh_1 spans 2 hosts; .* need jax 0.12"):
            alpa.runtime.load(several, executor="ray", workers=workers)
        return
    given = [np.arange(n, dtype=np.float32) for n in (4, 4, 4, 12)]
    local = alpa.runtime.load(moves)
    expected = local(*local(*given)[:2], *given[2:])
    with alpa.runtime.load(several, executor="ray", workers=workers) as step:
        results = step(*step(*given)[:2], *given[2:])
        for result, it in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, it)


def test_a_plan_that_is_larger_than_the_cluster(moves: str) -> None:
    large = on_three_hosts(moves)
    with pytest.raises(ClusterSizeError, match=r"needs 3 hosts with 1, 1, 1 GPU; .* have 0 GPU"):
        alpa.runtime.load(large, executor="ray", workers=WorkerOptions(platform="gpu"))


def test_logs_of_workers_reach_the_caller(
    moves: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Lines carry the mesh's name, at the level that the caller's own logger sets."""
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    caplog.set_level(logging.INFO, logger="alpa")
    text, deadline = "", time.monotonic() + 300
    with alpa.runtime.load(moves, executor="ray", workers=workers):
        while "compiled" not in text and time.monotonic() < deadline:
            time.sleep(0.1)
            text += "".join(capfd.readouterr())
    assert re.search(
        r"\(mesh_\d on host 0 pid=\d+\).* INFO alpa\S*: compiled \d of \d fragments", text
    )


def listening(process: int) -> set[str]:
    """The addresses at which a process listens, as in /proc: hexadecimal, with swapped bytes."""
    sockets = set[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(os.readlink(file))
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == "0A" and f"socket:[{line.split()[9]}]" in sockets:
                found.add(address.partition(":")[0])
    return found


def children(process: int) -> list[int]:
    """A process's children, and theirs."""
    direct = list[int]()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it may end meanwhile
            direct += map(int, task.read_text().split())
    return direct + [it for child in direct for it in children(child)]


def name_of(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("transport", "ours"),
    [
        ("auto", set[str]()),
        ("jax", {"0100007F"}),
        pytest.param("tcp", set[str](), marks=pytest.mark.slow),
    ],
)
def test_where_workers_on_one_node_listen(moves: str, transport: Any, ours: set[str]) -> None:
    """Nowhere once they are connected; JAX's server does, at the loopback.

    The only other listener, on all addresses, is Ray's, which each of its processes has.
    """
    rays = "0" * 32
    before = listening(os.getpid())
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300, transport=transport)
    with alpa.runtime.load(moves, executor="ray", workers=workers):
        assert listening(os.getpid()) == before
        found = [listening(it) for it in children(os.getpid()) if "Worker" in name_of(it)]
    assert found.count(ours | {rays}) >= 2, found
    assert all(it <= ours | {rays} for it in found)
