"""The folder the metadata store lives in: rights, locks, and whether the last machine stop was clean.

The records decide what users see, so nobody else may be able to write them: the folder must be ours, 0700 and
no symbolic link. One process at a time may use one namespace (`Claim`, an flock): its hot entries would not
notice another's writes.

The store is written without fsync (a listing is worth nothing compared with a stalled read). A killed process
loses nothing by that, a stopped *machine* may leave a torn file behind. So each claim notes the boot id while
it is open and "clean" when it was closed; a note of another boot means: do not trust the file.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusecache.errors import StateError

_CLEAN = b"clean"


def prepare_folder(folder: Path) -> None:
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


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Only one process at a time opens, checks or wipes what is in `folder`."""
    descriptor = _open_lock(folder / "open.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_claim(folder: Path, namespace: str, boot: str) -> Claim | None:
    """Claim a namespace; None when a process has it."""
    descriptor = _open_lock(folder / f"{namespace}.claim")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return Claim(descriptor, namespace, boot)


class Claim:
    """The exclusive right to one namespace, with the note about the last stop. Made by `try_claim`."""

    def __init__(self, descriptor: int, namespace: str, boot: str) -> None:
        self._descriptor: int | None = descriptor
        self.namespace = namespace
        self._boot = boot.encode()

    def mark_open(self) -> None:
        """Note that pages may be on their way to the disk, under this boot."""
        self._note(self._boot)

    def release(self, *, clean: bool) -> None:
        """Give the namespace up; `clean` when everything was synced. Idempotent."""
        if self._descriptor is not None:
            if clean:
                self._note(_CLEAN)
            os.close(self._descriptor)
            self._descriptor = None

    def _note(self, text: bytes) -> None:
        assert self._descriptor is not None
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        os.fsync(self._descriptor)


def torn(folder: Path, boot: str) -> bool:
    """Whether some namespace was open when the machine stopped: the file may be damaged."""
    for claim in folder.glob("*.claim"):
        note = claim.read_bytes()
        if note not in (b"", _CLEAN, boot.encode()):
            return True
    return False


def claimed(folder: Path, namespace: str) -> bool:
    """Whether a process uses `namespace` now."""
    descriptor = _open_lock(folder / f"{namespace}.claim")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise StateError(f"{path} can't be opened: {exc.strerror}") from exc
