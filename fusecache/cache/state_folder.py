"""The folder the metadata store lives in: locks, and whether the last machine stop was clean.

One process at a time may use one namespace (`Claim`, an flock): its hot entries would not notice another's writes. Who
may own the folder is `private_folder`'s.

The store is written without fsync (a listing is worth nothing compared with a stalled read). A killed process
loses nothing by that, a stopped *machine* may leave a torn file behind. So each claim notes the boot id while
it is open and "clean" when it was closed; a note of another boot means: do not trust the file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusecache.errors import StateError

_CLEAN = b"clean"

ABANDONED_S = 86400.0
"""After so long without use the metadata of another cluster under the same path is dropped."""


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
    if not _locked(descriptor):
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
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def is_abandoned(folder: Path, namespace: str, boot: str) -> bool:
    """Whether nobody will come back for `namespace`: given up in order ABANDONED_S ago, or left open by another boot.

    Not at once: while a mount is handed over, or its agent is started again, nobody has its namespace for a moment.
    """
    descriptor = _open_lock(folder / f"{namespace}.claim")
    try:
        note = os.pread(descriptor, 4096, 0)
        if not _locked(descriptor) or note == boot.encode():
            return False  # in use, or its process was killed
        return note != _CLEAN or time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock an open claim; False when another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise StateError(f"{path} can't be opened: {exc.strerror}") from exc
