"""Whether there is memory for pages that are pushed into the page cache before anybody asked for them.

Pages of FUSE_NOTIFY_STORE are charged to the cgroup of the process that writes the notification: the gate's. Without a
bound they would push out what our own processes need, and each other before they are read. So they are taken only while
a quarter of the cgroup's limit is free (without a limit: a quarter of the machine). The kernel's inactive page cache
counts as free, as kubelet counts it: block files that were read once fill every cgroup up to its limit otherwise.

Which files are worth pushing, and how many, is prefetch's to know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

LOOK_EVERY_S: Final = 0.1
FREE_SHARE: Final = 4
"""One of so many parts must be free."""
_UNLIMITED: Final = 1 << 60
"""cgroup v1 shows "no limit" as the largest number of pages."""


class Memory(NamedTuple):
    """Bytes of a cgroup, or of the machine."""

    limit: int
    in_use: int
    """Without what the kernel could drop at once."""


def has_room(memory: Memory | None) -> bool:
    """Whether a push may be taken; when nothing is known it may."""
    return memory is None or (memory.limit - memory.in_use) * FREE_SHARE >= memory.limit


class StoreRoom:
    """Looks at most every LOOK_EVERY_S. One thread at a time."""

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        """`root`: where /proc and /sys are looked for."""
        self._clock = clock
        self._root = root
        self._look_at_s = 0.0
        self._has_room = True

    def has_room(self) -> bool:
        """Whether a push may be taken now."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            self._has_room = has_room(self.memory())
        return self._has_room

    def memory(self) -> Memory | None:
        """Of the own cgroup if it has a limit, else of the machine; None when neither can be read."""
        return self._of_cgroup() or self._of_machine()

    def _of_cgroup(self) -> Memory | None:
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                names = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = (
                    "sys/fs/cgroup/memory",
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )
            else:
                continue
            # Inside a container without its own cgroup namespace the path is the host's: the limit is then at the top.
            for folder in (self._root / names[0] / path.lstrip("/"), self._root / names[0]):
                found = _cgroup_memory(folder, *names[1:])
                if found is not None:
                    return found
        return None

    def _of_machine(self) -> Memory | None:
        rows = _rows(self._root / "proc/meminfo")
        total, available = rows.get("MemTotal:"), rows.get("MemAvailable:")
        if total is None or available is None:
            return None
        return Memory(total << 10, (total - available) << 10)


def _cgroup_memory(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> Memory | None:
    """None when there is no limit, or no such file."""
    try:
        limit = int((folder / limit_name).read_text())
        usage = int((folder / usage_name).read_text())
    except (OSError, ValueError):  # "max": no limit
        return None
    if limit >= _UNLIMITED:
        return None
    return Memory(limit, max(0, usage - _rows(folder / "memory.stat").get(inactive_name, 0)))


def _rows(file: Path) -> dict[str, int]:
    """Name and number of each line."""
    rows: dict[str, int] = {}
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return rows
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            rows[words[0]] = int(words[1])
    return rows
