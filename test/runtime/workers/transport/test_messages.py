"""What all transports do with messages."""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport.base import Transport, TransportError
from test.runtime.workers.transport.pairs import NAMES, connect, connected, group, opened, shape_of

ALL: tuple[Name, ...] = ("shared", "tcp", "jax")
OURS: tuple[Name, ...] = ("shared", "tcp")


def put(array: np.ndarray, device: int = 0) -> jax.Array:
    return jax.device_put(array, jax.devices()[device])


@pytest.mark.parametrize("name", ALL)
def test_messages_arrive_in_order(name: Name) -> None:
    messages = [
        [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True)],
        [np.arange(1 << 20, dtype=np.int32)],
        [np.ones((3, 5), jnp.bfloat16), np.arange(3, dtype=np.int8), np.float64(2)],
    ]
    with connected(name) as (first, second), jax.enable_x64(True):
        for message in messages:
            first.send(1, [put(np.asarray(array)) for array in message])
        second.send(0, [put(np.array(7, np.float32), 1)])
        for message in messages:
            shapes = [shape_of(np.asarray(array), 1 + i % 2) for i, array in enumerate(message)]
            for i, (got, sent) in enumerate(zip(second.receive(0, shapes), message, strict=True)):
                assert got.devices() == {jax.devices()[1 + i % 2]}
                assert got.dtype == sent.dtype
                np.testing.assert_array_equal(got, sent)
        (answer,) = first.receive(1, [shape_of(np.zeros((), np.float32), 0)])
        assert answer == 7


@pytest.mark.parametrize("name", ALL)
def test_waiting_for_a_message_that_never_comes_ends(name: Name) -> None:
    with connected(name) as (first, _):
        message = "mesh_0 on host 0 has waited 0.2 s for 1 tiles from mesh_1 on host 0; it hangs"
        first.group = group(seconds=0.2)
        with pytest.raises(TransportError, match=re.escape(message)):
            first.receive(1, [shape_of(np.zeros(3), 0)])


@pytest.mark.parametrize("name", OURS)
def test_a_sender_does_not_wait_for_its_receiver(name: Name) -> None:
    with connected(name) as (first, second):
        for number in range(2000):
            first.send(1, [put(np.array([number]))])
        first.send(1, [put(np.ones(1 << 22, np.float32))])
        for number in range(2000):
            (got,) = second.receive(0, [shape_of(np.zeros(1, np.int32), 1)])
            assert got[0] == number
        (got,) = second.receive(0, [shape_of(np.ones(1 << 22, np.float32), 1)])
        assert got.min() == 1


@pytest.mark.parametrize("name", OURS)
def test_an_array_that_has_arrived_does_not_change(name: Name) -> None:
    """Its memory is used again only when the array is gone, even if a computation takes it over."""
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    with connected(name) as (first, second):
        held = list[jax.Array]()
        for number in range(20):
            sent = np.full(5000, number, np.float32)
            first.send(1, [put(sent)])
            (got,) = second.receive(0, [shape_of(sent, 1)])
            if number % 3 == 0:
                held.append(got)
            elif number % 3 == 1:
                held.append(double(got))
        for i, array in enumerate(held):
            number = i // 2 * 3 + i % 2
            np.testing.assert_array_equal(array, np.full(5000, (1 + i % 2) * number, np.float32))


@pytest.mark.parametrize("name", OURS)
def test_what_is_sent_may_change_afterwards(name: Name) -> None:
    overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
    with connected(name) as (first, second):
        sent = put(np.full(1 << 19, 3, np.float32))
        first.send(1, [sent])
        jax.block_until_ready(overwrite(sent))
        (got,) = second.receive(0, [shape_of(np.zeros(1 << 19, np.float32), 1)])
        np.testing.assert_array_equal(got, np.full(1 << 19, 3, np.float32))


@pytest.mark.parametrize("name", OURS)
def test_a_pause_between_messages_may_be_long(name: Name) -> None:
    """Longer than a receiver waits: it has not begun to wait."""
    with connected(name, seconds=1.0) as (first, second):
        for number in range(2):
            first.send(1, [jnp.full(3, number, jnp.float32)])
            (got,) = second.receive(0, [shape_of(np.zeros(3, np.float32), 1)])
            np.testing.assert_array_equal(got, np.full(3, number, np.float32))
            time.sleep(1.2)


@pytest.mark.parametrize("name", OURS)
def test_a_worker_that_has_gone(name: Name) -> None:
    """What it has sent arrives; nothing more is waited for, and it takes no more."""
    with connected(name) as (first, second):
        first.send(1, [jnp.ones(3)])
        first.close()
        shapes = [shape_of(np.ones(3, np.float32), 1)]
        np.testing.assert_array_equal(second.receive(0, shapes)[0], np.ones(3))
        with pytest.raises(TransportError, match="mesh_0 on host 0 has closed its connection"):
            second.receive(0, shapes)
        with pytest.raises(TransportError, match="mesh_0 on host 0 accepts no more tiles"):
            send_often(second)


def send_often(second: Transport) -> None:
    """Until the system notices that nobody reads."""
    for _ in range(100):
        second.send(0, [jnp.ones(1 << 16)])


def test_workers_on_two_hosts() -> None:
    """Those of one host share memory, and the others talk TCP; all at the same time."""
    names = tuple(f"worker {rank}" for rank in range(4))
    of = group(names=names, hosts=("a", "a", "b", "b"))
    workers = opened("auto", of)
    assert [sorted(it.address) for it in workers] == [["shared", "tcp"]] * 4
    connect(workers)
    try:
        assert {it.path for it in workers} == {"shared memory inside hosts and TCP between"}
        for i, one in enumerate(workers):
            for j, _ in enumerate(workers):
                if i != j:
                    one.send(j, [put(np.array([10 * i + j]))])
        for j, one in enumerate(workers):
            for i, _ in enumerate(workers):
                if i != j:
                    (got,) = one.receive(i, [shape_of(np.zeros(1, np.int32), 0)])
                    assert got[0] == 10 * i + j
    finally:
        for it in workers:
            it.close()


@pytest.mark.parametrize(
    ("name", "hosts", "path"),
    [
        ("auto", ("a", "a"), "shared memory"),
        ("shared", ("a", "a"), "shared memory"),
        ("auto", ("a", "b"), "TCP"),
        ("tcp", ("a", "a"), "TCP"),
        ("jax", ("a", "a"), "jax.experimental.transfer, through TCP"),
    ],
)
def test_the_way_of_tiles(name: Name, hosts: tuple[str, str], path: str) -> None:
    both = opened(name, group(hosts=hosts))
    assert [it.path for it in both] == [path, path]
    for it in both:
        it.close()


def test_shared_memory_between_hosts() -> None:
    message = 'transport="shared" needs all workers on one host, and they are on 2; take "auto"'
    with pytest.raises(ValueError, match=message):
        opened("shared", group(hosts=("a", "b")))


def test_a_single_worker_listens_nowhere() -> None:
    (alone,) = opened("auto", group(names=NAMES[:1], hosts=("a",)))
    assert alone.address == {}
    alone.connect([{}])


@pytest.mark.parametrize("name", OURS)
def test_a_worker_that_does_not_connect(name: Name) -> None:
    first, second = opened(name, group(seconds=0.5))
    message = "mesh_0 on host 0 has waited 0.5 s for mesh_1 on host 0 to connect; a firewall"
    with pytest.raises(TransportError, match=message):
        connect_one(first, second)
    second.close()


def connect_one(first: Transport, second: Transport) -> None:
    first.connect([first.address, second.address])
