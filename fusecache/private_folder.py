"""Folders of our own: what lies there decides what users see, so nobody else may be able to write it.

One rule for every state folder: ours, 0700 and no symbolic link. An existing folder with wider rights is refused, not
narrowed: whoever made it so may have meant it, and what was put there meanwhile would stay.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fusecache.errors import StateError


def prepare_private_folder(folder: Path) -> None:
    """Make `folder` (and what is missing above it), or check the existing one. Raises StateError."""
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
            missing.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as exc:
        raise StateError(f"state folder {folder} can't be made: {exc.strerror}") from exc
    if stat.S_ISLNK(status.st_mode):
        raise StateError(f"state folder {folder} is a symbolic link; name the folder itself")
    if not stat.S_ISDIR(status.st_mode):
        raise StateError(f"state folder {folder} is not a folder")
    if status.st_uid != os.geteuid():
        raise StateError(f"state folder {folder} belongs to uid {status.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StateError(
            f"state folder {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others could read or change it; "
            f"allowed is 0700 (chmod 700 {folder})"
        )
