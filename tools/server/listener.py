"""A Unix socket that only this user can connect to."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_ONLY_THIS_USER = 0o177
"""The permissions that `umask` takes away: the socket has mode 0600."""
_LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.05


@contextmanager
def listening_at(path: Path) -> Generator[socket.socket]:
    """A listening socket at a path, which is removed at the end.

    A socket that a server has left there, as after a kill, is replaced.

    Raises:
        OSError: there is another file, a socket of another user, or one that has a listener; or
            there can be no socket at this path.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _locked(path.parent):
            _remove_unused(path)
            # The kernel makes the file with these permissions: it never has others. The process
            # has one thread, so nothing else is made meanwhile.
            before = os.umask(_ONLY_THIS_USER)
            try:
                _bind(listener, path)
            finally:
                os.umask(before)
            ours = _identity(path)
            listener.listen()
        try:
            yield listener
        finally:
            with _locked(path.parent):
                if _identity(path) == ours:
                    path.unlink()


def _bind(listener: socket.socket, path: Path) -> None:
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.strerror is None:  # Python itself refuses a path that is too long.
            raise OSError(errno.ENAMETOOLONG, str(error)) from error
        raise


def _remove_unused(path: Path) -> None:
    """Removes a socket of this user without a listener. Raises OSError for any other file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "there is another file, which is no socket")
    if found.st_uid != os.geteuid():
        raise OSError(errno.EEXIST, "there is a socket of another user")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Keeps other servers from the sockets of a folder. Raises OSError if one keeps us too long."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    text = f"another process has kept {folder} locked for {_LOCK_SECONDS:g} s"
                    raise OSError(errno.EAGAIN, text) from error
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(file)  # The lock ends with it.
