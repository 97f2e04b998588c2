"""The control socket of a mount: bound by whoever holds the mount, served by the agent (classic: the one process).

The socket (0666) lies in a folder of who mounts (0755), and listens as that user: a client that asks the kernel who it
is talking to (SO_PEERCRED) finds the owner of the mount. The agent, which may be another user, gets the descriptor and
no right to the folder. As it outlives agents, a question that comes between two of them waits instead of failing.

Accepts nothing: `daemon.control` does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusecache.errors import StateError
from fusecache.private_folder import prepare_shared_folder

MOST_WAITING: Final = 32
"""Connections that nobody has accepted yet."""

_SUN_PATH: Final = 107
"""Longest path a socket address holds (unix(7): 108 with the closing NUL)."""


class ControlListener:
    """See the module. StateError when it can't be made."""

    def __init__(self, path: Path) -> None:
        """Takes the place of a socket that is there: of a daemon that was killed, or of one that hands over."""
        self._path = path
        prepare_shared_folder(path.parent)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
            with short_address(path) as address:
                self.socket.bind(address)
            path.chmod(0o666)  # whatever the umask: open to everybody, rights are checked per message
            self.socket.listen(MOST_WAITING)
            status = path.lstat()
        except OSError as failure:
            self.socket.close()
            raise StateError(
                f"control socket {str(path)!r} can't be made: {failure.strerror}; give another --runtime-dir"
            ) from None
        self._identity = (status.st_dev, status.st_ino)

    def close(self, *, is_last: bool = True) -> None:
        """Stop listening, and take the name away, unless a later daemon's socket has it now. Not `is_last`: another one
        is taking its place at this moment, and sees to the name."""
        self.socket.close()
        if not is_last:
            return
        with contextlib.suppress(OSError):  # gone already, or the folder is not empty: nothing to do either way
            status = self._path.lstat()
            if (status.st_dev, status.st_ino) == self._identity:
                self._path.unlink()
                self._path.parent.rmdir()


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address for a socket path of any length: a long one goes through a descriptor of its folder."""
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
