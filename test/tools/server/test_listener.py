"""A socket is for its user alone, and takes the place of nothing that is in use."""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from alpa.tools.server.listener import listening_at


def connected(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def test_only_its_user_may_connect_whatever_the_umask(tmp_path: Path) -> None:
    path, before = tmp_path / "s", os.umask(0)
    try:
        with listening_at(path):
            found = path.lstat()
            assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_the_file_never_has_other_permissions(tmp_path: Path) -> None:
    path, seen, ended = tmp_path / "s", set[int](), threading.Event()

    def look() -> None:
        while not ended.is_set():
            with suppress(FileNotFoundError):
                seen.add(stat.S_IMODE(path.lstat().st_mode))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        servers = 0
        while servers < 200 or not seen:
            with listening_at(path):
                servers += 1
    finally:
        ended.set()
        watcher.join()
    assert seen == {0o600}


def test_it_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with suppress(KeyboardInterrupt), listening_at(path):
        assert connected(path)
        raise KeyboardInterrupt
    assert not path.exists()


def test_a_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    with listening_at(path):
        assert connected(path)


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening_at(path):
        with pytest.raises(OSError, match="another server listens there"), listening_at(path):
            pass
        assert connected(path)


def test_the_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another server listens there"), listening_at(path):
            pass
        assert connected(path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("kept")
    link.symlink_to(tmp_path / "nowhere")
    for path in (file, link, tmp_path):
        with pytest.raises(OSError, match="another file, which is no socket"), listening_at(path):
            pass
    assert file.read_text() == "kept"
    assert link.is_symlink()


def test_a_socket_that_took_our_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening_at(path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_one_of_many_that_begin_at_once_gets_the_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    begin, end, refused = threading.Barrier(4), threading.Barrier(4), list[str]()

    def serve() -> None:
        begin.wait()
        try:
            with listening_at(path):
                end.wait()
        except OSError as error:
            refused.append(str(error.strerror))
            end.wait()

    servers = [threading.Thread(target=serve) for _ in range(4)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert refused == ["another server listens there"] * 3


def test_a_folder_that_stays_locked_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), listening_at(tmp_path / "no" / "s"):
        pass
    with pytest.raises(OSError, match="too long"), listening_at(tmp_path / ("s" * 200)):
        pass
