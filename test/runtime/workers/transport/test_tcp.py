"""Messages in several streams, and TLS."""

from __future__ import annotations

import queue
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.runtime.workers.options import TlsFiles
from alpa.runtime.workers.transport.base import TransportError
from alpa.runtime.workers.transport.tcp import Assembly, shares
from test.runtime.workers.transport.pairs import connect, connected, group, opened, shape_of


@given(sizes=st.lists(st.integers(0, 1 << 21), max_size=6), streams=st.integers(1, 5))
def test_shares_have_each_byte_once(sizes: list[int], streams: int) -> None:
    found = shares(sizes, streams)
    assert len(found) in (1, streams)
    in_order = [it for share in found for it in share]
    for part, size in enumerate(sizes):
        mine = [(it.begin, it.end) for it in in_order if it.part == part]
        assert [begin for begin, _ in mine] == [0, *(end for _, end in mine)][: len(mine)]
        assert sum(end - begin for begin, end in mine) == size
    if len(found) > 1:
        lengths = [sum(it.end - it.begin for it in share) for share in found]
        assert max(lengths) - min(lengths) <= 1


LARGE, SMALL = [1 << 20], [8]


def test_a_small_message_does_not_overtake_a_large_one() -> None:
    inbox = queue.SimpleQueue[list[np.ndarray] | None]()
    assembly = Assembly(2, inbox)
    for stream in (0, 1):
        for view in assembly.share(0, LARGE, stream):
            view[:] = bytes([stream + 1]) * len(view)
    assembly.has(0, 0)
    assembly.share(1, SMALL, 0)
    assembly.has(1, 0)
    assert inbox.empty()
    assembly.has(0, 1)
    (first,) = inbox.get_nowait() or ()
    assert [first[0], first[-1], len(first)] == [1, 2, 1 << 20]
    (second,) = inbox.get_nowait() or ()
    assert len(second) == 8


def test_the_last_message_arrives_though_one_stream_has_ended() -> None:
    inbox = queue.SimpleQueue[list[np.ndarray] | None]()
    assembly = Assembly(2, inbox)
    for stream in (0, 1):
        assembly.share(0, LARGE, stream)
    assembly.has(0, 0)
    assembly.end(0)
    assert inbox.empty()
    assembly.has(0, 1)
    assert inbox.get_nowait() is not None
    assert inbox.get_nowait() is None


def test_a_message_whose_stream_has_broken_is_the_end() -> None:
    inbox = queue.SimpleQueue[list[np.ndarray] | None]()
    assembly = Assembly(2, inbox)
    assembly.share(0, LARGE, 0)
    assembly.end(1)
    assert inbox.get_nowait() is None


def certificates(folder: Path) -> TlsFiles:
    """A certificate that an authority of its own has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl makes the certificates, and is not installed")
    folder.mkdir()

    def openssl(text: str) -> None:
        subprocess.run(["openssl", *text.split()], cwd=folder, check=True, capture_output=True)

    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    openssl(f"req -x509 {key} -keyout authority.key -out authority.pem -days 2 -subj /CN=authority")
    openssl(f"req {key} -keyout host.key -out host.csr -subj /CN=host")
    openssl(
        "x509 -req -in host.csr -CA authority.pem -CAkey authority.key -CAcreateserial "
        "-out host.pem -days 2"
    )
    return TlsFiles(
        certificate=folder / "host.pem", key=folder / "host.key", authority=folder / "authority.pem"
    )


def test_tls(tmp_path: Path) -> None:
    files = certificates(tmp_path / "ours")
    with connected("tcp", tls=files) as (first, second):
        assert first.path == "TLS"
        sent = np.arange(1 << 19, dtype=np.float32)
        first.send(1, [jnp.asarray(sent)])
        first.send(1, [jnp.ones(3)])
        np.testing.assert_array_equal(second.receive(0, [shape_of(sent, 1)])[0], sent)
        (got,) = second.receive(0, [shape_of(np.ones(3, np.float32), 1)])
        np.testing.assert_array_equal(got, np.ones(3))


def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    of = group(seconds=2.0, tls=certificates(tmp_path / "ours"))
    (first, _) = opened("tcp", of)
    theirs = group(seconds=2.0, secret=of.secret, tls=certificates(tmp_path / "theirs"))
    (_, second) = opened("tcp", theirs)
    with pytest.raises(TransportError, match=r"cannot reach mesh_. on host 0: .*certificate"):
        connect([first, second])
    for it in (first, second):
        it.close()


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nothing")
    files = TlsFiles(certificate=tmp_path / "a", key=tmp_path / "a", authority=tmp_path / "a")
    with pytest.raises(OSError, match="PEM"):
        opened("tcp", group(tls=files))
