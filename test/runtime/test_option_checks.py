"""Invalid options are rejected where the user gives them, with the value and the expectation."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import TlsFiles, WorkerOptions, load, prefetch

STEP = alpa.parallelize(lambda w: w, cluster="cpu:1x1")


def init() -> dict[str, Any]:
    return {"x": jnp.ones(2)}


@pytest.mark.parametrize("name", ["timeout_seconds", "checkpoint_timeout_seconds"])
@pytest.mark.parametrize("value", [nan, inf, -inf, 0, -1.0, 1e300, "60", None, True])
def test_timeouts(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; expected a number of seconds above 0"):
        WorkerOptions(**{name: value})


@pytest.mark.parametrize("value", [60, 0.5, np.float32(2)])
def test_timeouts_that_can_be(value: Any) -> None:
    assert WorkerOptions(timeout_seconds=value).timeout_seconds == value


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"steps_ahead": 0}, "steps_ahead is 0; expected a whole number of at least 1"),
        ({"steps_ahead": nan}, "steps_ahead is nan; expected a whole number"),
        ({"steps_ahead": 1.5}, "steps_ahead is 1.5; expected a whole number"),
        ({"platform": "cuda"}, "platform is 'cuda'; expected one of cpu, gpu, tpu"),
        ({"transport": "pigeon"}, "transport is 'pigeon'; expected one of auto, shared, tcp, jax"),
        ({"transport": "device"}, "transport 'device' is called 'jax' now; the default, \"auto\""),
        ({"transport": "sockets"}, "transport 'sockets' is called 'tcp' now"),
        ({"tls": "cert.pem"}, "tls is 'cert.pem', of type str; expected TlsFiles or None"),
        (
            {
                "transport": "jax",
                "tls": TlsFiles(certificate="host.pem", key="host.key", authority="ours.pem"),
            },
            "tls is for TCP between hosts; transport 'jax' has none",
        ),
        ({"address": 6379}, "address is 6379, of type int; expected str or None"),
        (
            {"address": b"a" * 999},
            r"address is b'a{1,40}\.\.\.a{1,40}', of type bytes; expected str",
        ),
        ({"cache_directory": 1}, "cache_directory is 1, of type int; expected str or Path or None"),
        ({"environment": {"A": 1}}, r"environment\['A'\] is 1, of type int; expected str"),
        ({"pin_cores": nan}, "pin_cores is nan, of type float; expected bool"),
    ],
)
def test_options_of_workers(option: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        WorkerOptions(**option)


ON_BOTH = [
    ({"executor": "thread"}, "executor is 'thread'; expected one of local, ray"),
    ({"devices": []}, "devices is empty; name at least one device, or omit devices="),
    ({"devices": [0, 1]}, r"devices\[0\] is 0, of type int; expected JAX devices"),
    ({"devices": jax.devices()[:1] * 2}, r"devices\[0\] and devices\[1\] are both"),
    ({"workers": 2}, "workers is 2, of type int; expected WorkerOptions or None"),
    ({"compiler_options": 1}, "compiler_options is 1, of type int; expected Mapping or None"),
    ({"executables": 1}, "executables is 1, of type int; expected str or Path or list or tuple"),
    ({"executables": [1]}, "a folder in executables is 1, of type int; expected str or Path"),
    ({"compiler_options": {"a": nan}}, r"compiler_options\['a'\] is nan; expected a finite number"),
]


@pytest.mark.parametrize(("option", "words"), ON_BOTH)
def test_options_of_running(option: dict[str, Any], words: str, moves: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        load(moves, **option)
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        alpa.parallelize(jnp.sin, cluster="cpu:1x2", **option)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *[
            ({"num_micro_batches": value}, "num_micro_batches is .*; expected a number of at least")
            for value in (nan, inf, 0, -1, 2.0, True, None)
        ],
        ({"cluster": 8}, "cluster is 8, of type int; expected str"),
        ({"mesh_shape": nan}, "mesh_shape is nan, of type float; expected str"),
        ({"check_finite": nan}, "check_finite is nan, of type float; expected bool"),
        ({"donate_argnums": nan}, "donate_argnums holds nan, of type float; expected positions"),
        ({"batch_argnums": [0, 0.5]}, "batch_argnums holds 0.5, of type float; expected positions"),
        ({"schedule": nan}, "schedule is nan, of type float; expected str or list or tuple"),
        (
            {"schedule": "zb"},
            '"zb" is neither the name of a schedule, gpipe, .* or dualpipe-v, nor a file',
        ),
        ({"schedule": [["0F0"], "1F0"]}, "a mesh's list in schedule is '1F0', of type str"),
        ({"schedule": [["0B0", "0F0"]]}, "0B0 depends on 0F0, which mesh 0 runs later"),
    ],
)
def test_options_of_parallelize(option: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        alpa.parallelize(jnp.sin, **({"cluster": "cpu:1x2"} | option))


def test_an_argument_that_is_static_and_donated() -> None:
    with pytest.raises(ValueError, match=r"cannot intersect. Argument names \['x'\] appear in bo"):
        alpa.parallelize(lambda x: x, cluster="cpu:1x1", static_argnums=0, donate_argnames="x")


def test_numbers_of_numpy() -> None:
    step = alpa.parallelize(
        lambda w, x: x * w,
        cluster="cpu:1x1",
        num_micro_batches=np.int64(2),
        batch_argnums=[np.int64(1)],
    )
    assert step(2.0, np.ones(4, np.float32)).tolist() == [2] * 4


@pytest.mark.parametrize("value", [-1, 0.5, nan, inf])
def test_counts(value: Any, moves: str, tmp_path: Any) -> None:
    match = "is .*; expected a whole number of at least"
    with pytest.raises(ValueError, match=f"^ahead {match} 0"):
        next(prefetch(load(moves), [], ahead=value))
    with pytest.raises(ValueError, match=f"^step {match} 0"):
        alpa.save(tmp_path, value, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=f"^keep {match} 1"):
        alpa.save(tmp_path, 1, {"w": jnp.ones(3)}, keep=value)
    with pytest.raises(ValueError, match=f"^step {match} 0"):
        alpa.restore(tmp_path, lambda: jnp.ones(3), step=value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: alpa.save(None, 1, {}), "directory is None"),
        (lambda: alpa.restore(7, init), "directory is 7"),
        (lambda: alpa.latest_step([]), "directory is \\[\\]"),
        (lambda: alpa.create_state(init, np.ones(2)), "train_step is array"),
        (lambda: alpa.create_state("init", STEP), "init_fn is 'init'"),
        (lambda: alpa.create_state(init, STEP, argnums="x"), "argnums is 'x'"),
        (lambda: alpa.create_state(init, STEP, argnums=-1), "argnums is -1"),
        (lambda: alpa.create_state(lambda: (1, 2), STEP, argnums=(0,)), "tuple of 1 arguments"),
        (lambda: load({}), "planned is {}"),
        (lambda: load("{", devices=True), "devices is True"),
        (lambda: alpa.parallelize(len, cluster="cpu:1x1", explain_roles=np.ones(2)), "explain_r"),
        (lambda: alpa.parallelize(len, cluster="cpu:1x1", num_micro_batches=np.ones(2)), "num_mi"),
    ],
)
def test_arguments_of_other_types_are_refused(call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()
