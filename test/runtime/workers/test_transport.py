"""Tiles between workers: here two workers in one process."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport import Transport, TransportError, open_transport

NAMES = ["mesh_0 on host 0", "mesh_1 on host 0"]


def pair(name: Name, seconds: float = 20.0) -> list[Transport]:
    owners = {0: 0, 1: 1, 2: 1}
    both = [open_transport(name, "127.0.0.1", rank, NAMES, owners, seconds)[0] for rank in (0, 1)]
    for it in both:
        it.connect([other.address for other in both])
    return both


def shape_of(array: np.ndarray, device: int) -> jax.ShapeDtypeStruct:
    sharding = SingleDeviceSharding(jax.devices()[device])
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


@pytest.mark.parametrize("name", ["device", "sockets"])
def test_messages_arrive_in_order(name: Name) -> None:
    first, second = pair(name)
    messages = [
        [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True)],
        [np.arange(1 << 18, dtype=np.int32)],
        [np.ones((3, 5), jnp.bfloat16)],
    ]
    for message in messages:
        first.send(1, [jax.device_put(array, jax.devices()[0]) for array in message])
    second.send(0, [jax.device_put(np.float32(7), jax.devices()[1])])
    for message in messages:
        shapes = [shape_of(array, 1 + i) for i, array in enumerate(message)]
        for i, (got, sent) in enumerate(zip(second.receive(0, shapes), message, strict=True)):
            assert got.devices() == {jax.devices()[1 + i]}
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(got, sent)
    (answer,) = first.receive(1, [shape_of(np.zeros((), np.float32), 0)])
    assert answer == 7


@pytest.mark.parametrize("name", ["device", "sockets"])
def test_waiting_for_a_value_that_never_comes_ends(name: Name) -> None:
    first, _ = pair(name, seconds=0.2)
    message = "mesh_0 on host 0 has waited 0.2 s for 1 tiles from mesh_1 on host 0; it hangs"
    with pytest.raises(TransportError, match=re.escape(message)):
        first.receive(1, [shape_of(np.zeros(3), 0)])


def test_a_connection_without_the_secret_is_refused() -> None:
    first, second = pair("sockets", seconds=0.5)
    ip, port, secret = second.address.split()
    first.connect([first.address, f"{ip} {port} {secret[::-1]}"])
    with suppress(TransportError):  # the connection may close before all is sent
        first.send(1, [jnp.ones(3)])
    with pytest.raises(TransportError, match="has waited"):
        second.receive(0, [shape_of(np.zeros(3, np.float32), 1)])


def test_a_silent_connection_is_closed() -> None:
    """This keeps others from exhausting a worker's threads and files."""
    _, second = pair("sockets", seconds=0.2)
    ip, port, _ = second.address.split()
    with socket.create_connection((ip, int(port)), timeout=20) as connection:
        assert connection.recv(1) == b""  # closed by the other side


def test_a_pause_between_messages_may_be_long() -> None:
    """Longer than a receiver waits: it has not begun to wait."""
    first, second = pair("sockets", seconds=0.3)
    for number in range(2):
        first.send(1, [jnp.full(3, number, jnp.float32)])
        (got,) = second.receive(0, [shape_of(np.zeros(3, np.float32), 1)])
        np.testing.assert_array_equal(got, np.full(3, number, np.float32))
        time.sleep(0.6)


def test_a_worker_that_has_gone_takes_no_tiles() -> None:
    first, second = pair("sockets", seconds=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first.connect([first.address, f"127.0.0.1 {port} {second.address.split()[2]}"])
    with pytest.raises(TransportError, match="mesh_1 on host 0 accepts no more tiles"):
        first.send(1, [jnp.ones(3)])


def test_the_way_of_tiles_and_the_reason() -> None:
    names: tuple[Name, ...] = ("auto", "device", "sockets")
    found = [open_transport(it, "127.0.0.1", 0, NAMES, {}, 1.0) for it in names]
    assert [(it.path, reason) for it, reason in found] == [
        ("jax.experimental.transfer, through TCP", "transport=auto"),
        ("jax.experimental.transfer, through TCP", "transport=device"),
        ("sockets, through host memory and TCP", "transport=sockets"),
    ]


def test_a_platform_without_transfers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise NotImplementedError("no DmaMap")

    monkeypatch.setattr(transfer, "start_transfer_server", refused)
    it, reason = open_transport("auto", "127.0.0.1", 0, NAMES, {}, 1.0)
    assert it.path.startswith("sockets")
    assert reason.endswith("between devices of several processes: no DmaMap")
    assert "mesh_0 on host 0 sends tiles through host memory" in caplog.text
    with pytest.raises(NotImplementedError):
        open_transport("device", "127.0.0.1", 0, NAMES, {}, 1.0)


def test_an_unknown_transport() -> None:
    with pytest.raises(ValueError, match="no transport 'post': there are auto, device, sockets"):
        open_transport("post", "127.0.0.1", 0, NAMES, {}, 1.0)  # pyright: ignore[reportArgumentType]
