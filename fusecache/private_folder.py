"""Folders of our own: what lies there decides what users see, so nobody else may be able to write it.

    private   ours alone, 0700: metadata, the agent's socket, the embedded server's state
    shared    made by who mounts, for others to enter: the state folder, the folder of control sockets

One rule for both: no symbolic link, nobody else's, and nobody else may write there. An existing folder with wider
rights is refused, not narrowed: whoever made it so may have meant it, and what was put there meanwhile would stay.

Root can make a private folder for the user that workers and agent become (`make_for`). Only what is empty is given
away; a folder with content must be that user's already.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fusecache.errors import StateError


def prepare_private_folder(folder: Path) -> None:
    """Make `folder` (and what is missing above it), or check the existing one. Raises StateError."""
    _make_missing(folder, 0o700)
    _check_private(folder, os.geteuid())


def make_for(folder: Path, uid: int, gid: int) -> None:
    """Make `folder` for another user, in a folder that `prepare_shared_folder` has checked, or check the existing one.

    By root. Raises StateError.
    """
    _make_missing(folder, 0o700)
    with _opened(folder) as descriptor:
        if os.fstat(descriptor).st_uid == os.geteuid() and not os.listdir(descriptor):
            os.fchown(descriptor, uid, gid)
    _check_private(folder, uid)


def prepare_shared_folder(folder: Path, *, entered_by_others: bool = True) -> None:
    """Make `folder` (and what is missing above it), or check the existing one. Raises StateError.

    `entered_by_others`: an existing folder of ours that they can't enter is opened that far, and no further.
    """
    _make_missing(folder, 0o755 if entered_by_others else 0o700)
    status = _status(folder)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        raise StateError(f"folder {folder} belongs to uid {status.st_uid}, not to {os.geteuid()}; give another one")
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise StateError(
            f"folder {folder} has mode {mode:04o}: others could replace what is in it; "
            f"take their right to write away (chmod go-w {folder})"
        )
    if entered_by_others and status.st_uid == os.geteuid() and mode & 0o011 != 0o011:
        with _opened(folder) as descriptor:
            os.fchmod(descriptor, mode | 0o011)


def _make_missing(folder: Path, mode: int) -> None:
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
            with contextlib.suppress(FileExistsError):
                missing.mkdir(mode=mode)
                with _opened(missing) as descriptor:  # not by its name, which may be another thing's by now
                    os.fchmod(descriptor, mode)  # whatever the umask
    except OSError as exc:
        raise StateError(
            f"folder {folder} can't be made: {exc.strerror}; give another --state-dir or --runtime-dir"
        ) from exc


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder itself. StateError when it is a symbolic link or no folder, or anything fails."""
    _status(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise StateError(f"folder {folder} can't be prepared: {exc.strerror}") from exc


def _status(folder: Path) -> os.stat_result:
    """StateError when it is a symbolic link or no folder."""
    try:
        status = folder.lstat()
    except OSError as exc:
        raise StateError(f"folder {folder} can't be used: {exc.strerror}") from exc
    if stat.S_ISLNK(status.st_mode):
        raise StateError(f"folder {folder} is a symbolic link; name the folder itself")
    if not stat.S_ISDIR(status.st_mode):
        raise StateError(f"{folder} is not a folder")
    return status


def _check_private(folder: Path, owner: int) -> None:
    status = _status(folder)
    if status.st_uid != owner:
        raise StateError(f"state folder {folder} belongs to uid {status.st_uid}, not to {owner}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StateError(
            f"state folder {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others could read or change it; "
            f"allowed is 0700 (chmod 700 {folder})"
        )
