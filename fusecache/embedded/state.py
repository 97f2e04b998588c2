"""The embedded server's own folder: who may own it, and that only one server uses it at a time.

Ids, the cluster id and cached blocks live here over restarts. Does not know what is stored inside.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path

from fusecache.errors import StateError


def state_folder_for(base: Path, folder: Path) -> Path:
    """The state folder of one source folder below `base`: a name made of the folder's real path.

    Two folders never share ids, and the same folder finds its own again.
    """
    real = os.path.realpath(os.fsencode(folder))
    return base / hashlib.sha256(real).hexdigest()[:16]


class StateFolder:
    """A private (0700) folder, locked for this process until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _make_private(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(lock)
            raise StateError(
                f"state folder {str(path)!r} is in use by another embedded server; stop it or name another folder"
            ) from exc
        self._lock = lock

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _make_private(path: Path) -> None:
    """Create `path` (0700) or check that it is a real folder of this user.

    A folder that somebody else prepared, or a symbolic link, would let them choose where our files go:
    StateError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        raise StateError(f"state folder {str(path)!r} can't be made: {exc.strerror}") from exc
    if stat.S_ISLNK(found.st_mode):
        raise StateError(f"state folder {str(path)!r} is a symbolic link; name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise StateError(f"state folder {str(path)!r} is not a folder")
    if found.st_uid != os.geteuid():
        raise StateError(f"state folder {str(path)!r} belongs to uid {found.st_uid}, not to uid {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
