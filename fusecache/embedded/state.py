"""The embedded server's own folder: who may own it, and that only one server uses it at a time.

Ids, the cluster id and cached blocks live here over restarts. Does not know what is stored inside.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from fusecache.errors import StateError
from fusecache.private_folder import prepare_private_folder


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
        prepare_private_folder(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(lock)
            raise StateError(
                f"state folder {str(path)!r} is in use by another embedded server, for example that of a "
                "mount of the same folder; end that one, or give another --state-dir"
            ) from exc
        self._lock = lock

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
