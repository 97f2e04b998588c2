"""A fire drill on a mount that serves: kill its own processes while reading, and say what the reader noticed.

    files of the mount -> a reader compares each read with the first one, past the page cache
    meanwhile: SIGKILL one part, wait until another process has its place -> longest read that met the kill

Only processes that call themselves a part of this mount are killed (`kernel.process_name`): the ids come from the
daemon, which may live in another process namespace. Changes nothing else, and decides nothing about restarts.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from fusecache.errors import FusecacheError, MountError, UsageError

MOST_FILES = 64
MOST_LOOKED_AT = 2000
"""Entries of the mount that are looked at for files to read."""

PIECE_BYTES = 1 << 20
"""What is read of a file: its start."""

BETWEEN_S = 1.0
"""Undisturbed reading before each kill, and after the last one."""

BACK_S = 60.0
POLL_S = 0.02
MOST_TOLD = 5


class Call(NamedTuple):
    """One read: opening, reading and closing a file."""

    started_s: float
    """Monotonic clock."""
    took_s: float


class Kill(NamedTuple):
    """One kill that took place."""

    part: str
    pid: int
    at_s: float
    """Monotonic clock."""
    back_s: float
    """Until another process was ready in its place."""


class Report(NamedTuple):
    """What came of it."""

    kills: list[Kill]
    pauses_s: list[float]
    """For each kill the longest read that was in progress, or began before the part was back."""

    reads: int
    longest_quiet_s: float
    """Longest read that met no kill."""

    errors: list[str]
    """Reads that failed, or gave other bytes than the first time."""


Ask = Callable[[], dict[str, Any]]
"""The mount's status; FusecacheError while nobody answers."""


def run(mountpoint: Path, ask: Ask, parts: Sequence[str], kills: int, on_kill: Callable[[Kill], None]) -> Report:
    """Kill `parts` (`worker`: each in turn) one after the other, one of each kind and then again, `kills` in all, while
    reading files of the mount.

    Raises UsageError for a mount without such parts or files, MountError when one can't be killed or does not come
    back.
    """
    victims = _victims(ask(), parts)
    done: list[Kill] = []
    with Reader(mountpoint) as reader:
        for number in range(kills):
            time.sleep(BETWEEN_S)
            done.append(_kill(mountpoint, ask, victims[number % len(victims)]))
            on_kill(done[-1])
        time.sleep(BETWEEN_S)
    calls = reader.calls
    meeting = [[call.took_s for call in calls if _meets(call, kill)] for kill in done]
    quiet = [call.took_s for call in calls if not any(_meets(call, kill) for kill in done)]
    return Report(
        done, [max(took, default=0.0) for took in meeting], len(calls), max(quiet, default=0.0), reader.errors
    )


def _meets(call: Call, kill: Kill) -> bool:
    return call.started_s < kill.at_s + kill.back_s and call.started_s + call.took_s > kill.at_s


def _victims(status: dict[str, Any], wanted: Sequence[str]) -> list[str]:
    names = [str(row["name"]) for row in status.get("parts", ())]
    if not names:
        raise UsageError(
            "the mount is served by one process (open_mode classic), which nothing outlives: a drill needs open_mode "
            "no-open or passthrough"
        )
    kinds = [[name for name in names if name.split()[0] == part] for part in wanted]
    # One of each kind first, so that few kills meet all that were asked for.
    victims = [name for one_each in zip_longest(*kinds) for name in one_each if name is not None]
    if not victims:
        raise UsageError(f"the mount has no part called {', '.join(wanted)}; it has {', '.join(names)}")
    return victims


def _row(ask: Ask, name: str) -> dict[str, Any] | None:
    """A part's row in the status; None while nobody answers."""
    try:
        rows = ask().get("parts", ())
    except FusecacheError:
        return None
    return next((row for row in rows if row["name"] == name), None)


def _kill(mountpoint: Path, ask: Ask, name: str) -> Kill:
    deadline_s = time.monotonic() + BACK_S
    while (before := _row(ask, name)) is None or not before["ready"]:
        _not_for_ever(deadline_s, f"{name} does not run")
    pid = int(before["pid"])
    if not is_part(pid, name, mountpoint):
        raise MountError(
            f"process {pid} is not {name} of {str(mountpoint)!r} here: run the drill where the daemon runs, as root or "
            "as the user who mounted"
        )
    at_s = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        raise MountError(
            f"{name} (process {pid}) can't be killed by uid {os.getuid()}; run the drill as root"
        ) from None
    except ProcessLookupError:
        pass  # it died this moment by itself, which does as well
    while (now := _row(ask, name)) is None or now["pid"] in (None, pid) or not now["ready"]:
        _not_for_ever(deadline_s, f"{name} was killed and is not back")
    return Kill(name, pid, at_s, time.monotonic() - at_s)


def _not_for_ever(deadline_s: float, what: str) -> None:
    if time.monotonic() > deadline_s:
        raise MountError(f"{what} within {BACK_S:.0f} s")
    time.sleep(POLL_S)


def is_part(pid: int, name: str, mountpoint: Path) -> bool:
    """Whether the process calls itself this part of the mount, as far as its command line has room for it."""
    try:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return False
    whole = os.fsencode(f"fusecache: {name} {mountpoint}")
    return shown.startswith(os.fsencode(f"fusecache: {name} ")) and whole.startswith(shown)


class Reader:
    """Reads files of the mount over and over in a thread of its own, while it is entered."""

    def __init__(self, mountpoint: Path) -> None:
        """Raises UsageError when there is nothing to read."""
        self._paths = list(files_of(mountpoint))
        if not self._paths:
            raise UsageError(
                f"{str(mountpoint)!r} has no file that can be read among its first {MOST_LOOKED_AT} entries"
            )
        self._first: dict[Path, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drill-reader", daemon=True)
        self.calls: list[Call] = []
        self.errors: list[str] = []

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(BACK_S)  # a read that hangs must not hang the drill

    def _run(self) -> None:
        while True:
            for path in self._paths:
                if self._stop.is_set():
                    return
                began_s = time.monotonic()
                try:
                    digest = read_start(path)
                except OSError as error:
                    self.errors.append(f"{path}: {error.strerror}")
                else:
                    if digest != self._first.setdefault(path, digest):
                        self.errors.append(f"{path}: other bytes than the first time")
                self.calls.append(Call(began_s, time.monotonic() - began_s))


def files_of(mountpoint: Path) -> Iterator[Path]:
    """Up to MOST_FILES files with content, from the top."""
    found = looked_at = 0
    for top, folders, names in os.walk(mountpoint):
        if Path(top) == mountpoint and ".fusecache" in folders:
            folders.remove(".fusecache")
        for name in names:
            looked_at += 1
            path = Path(top, name)
            try:
                is_read = path.stat().st_size > 0 and os.access(path, os.R_OK)
            except OSError:
                continue
            if is_read:
                found += 1
                yield path
            if found >= MOST_FILES or looked_at >= MOST_LOOKED_AT:
                return


def read_start(path: Path) -> bytes:
    """Digest of a file's first PIECE_BYTES, read past the pages that the kernel has kept."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.blake2b(os.pread(descriptor, PIECE_BYTES, 0)).digest()
    finally:
        os.close(descriptor)
