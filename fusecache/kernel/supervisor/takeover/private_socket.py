"""Where a mount can be taken over: a unix socket in a folder of its own, 0700 and its owner's.

The folder lies below the runtime folder (in Kubernetes a folder of the node, because the old and the new pod have
mount and PID namespaces of their own). It is opened once, without following a link, checked on the descriptor, and the
socket is reached through that: nobody can exchange it in between, and its path may be of any length. Both sides look at
the other one's user (SO_PEERCRED): its own, or root.

A new side puts its socket in the old one's place by rename, so that there is always one that listens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from typing import Final

from fusecache.errors import MountError, StateError
from fusecache.kernel.supervisor.takeover.line import CREDENTIALS, Line

CONNECT_S: Final = 5.0
_BACKLOG: Final = 4
_NONE_LEFT: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class PrivateSocket:
    """Listening, from `listen` to `close`."""

    def __init__(self, path: str) -> None:
        """StateError when the folder is not private, or the socket can't be made."""
        self._path = path
        name = os.path.basename(path)
        temporary = f".{name}.{secrets.token_hex(4)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _folder(path) as folder:
                self._socket.bind(f"/proc/self/fd/{folder}/{temporary}")
                os.chmod(temporary, 0o600, dir_fd=folder)
                self._socket.listen(_BACKLOG)
                self._socket.setblocking(False)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                self._identity = _identity(name, folder)
        except OSError as failure:
            self._socket.close()
            raise StateError(f"take-over socket {path!r} can't be made: {failure.strerror}") from None
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> Line | None:
        """Who has come; None: nobody, or somebody who must not. OSError when there is no descriptor for it: whoever has
        come waits."""
        try:
            connection, _ = self._socket.accept()
        except OSError as failure:
            if failure.errno in _NONE_LEFT:
                raise
            return None
        if not _is_trusted(connection):
            connection.close()
            return None
        return Line(connection)

    def close(self, *, is_last: bool) -> None:
        """Listen no more. `is_last`: nobody takes the name over, so it goes too, unless it is another one's by now."""
        self._socket.close()
        if not is_last:
            return
        name = os.path.basename(self._path)
        with contextlib.suppress(OSError, StateError), _folder(self._path) as folder:
            if _identity(name, folder) == self._identity:
                os.unlink(name, dir_fd=folder)


def connect(path: str) -> Line:
    """To whoever has the mount. MountError when nobody listens there, or somebody who must not be trusted; StateError
    when the folder is not private."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(CONNECT_S)
        with _folder(path) as folder:
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        if not _is_trusted(connection):
            raise MountError(f"take-over socket {path!r} is another user's")
    except OSError as failure:
        connection.close()
        raise MountError(f"nobody listens at the take-over socket {path!r}: {failure.strerror or failure}") from None
    except BaseException:
        connection.close()
        raise
    return Line(connection)


@contextlib.contextmanager
def _folder(path: str) -> Iterator[int]:
    """A descriptor of the socket's folder, checked. OSError, StateError."""
    name = os.path.dirname(path)
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise StateError(
                f"take-over folder {name!r} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}; "
                f"it must be this user's ({os.geteuid()}), with mode 0700"
            )
        yield folder
    finally:
        os.close(folder)


def _identity(name: str, folder: int) -> tuple[int, int]:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return status.st_dev, status.st_ino


def _is_trusted(connection: socket.socket) -> bool:
    _, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return uid in (0, os.geteuid())
