"""How long what was listed may be served: the rules, without any clock.

Folders are what ages. A folder is fresh for `refresh_s` from the moment its listing was *asked for*, less a
jitter (so that the folders of many nodes do not come due together); an `immutable` one is fresh for ever. When
no master answers, what is no longer fresh may be served for `stale_if_error_s` more.

Pure: callers pass ages in. It decides nothing about single files: an incomplete file is
never fresh, which the tree sees to.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

JITTER: Final = 0.2
"""A folder comes due up to this part of `refresh_s` early. Early, never late: `refresh_s` is a promise."""

AHEAD: Final = 0.1
"""The background refresher lists a folder in use again when this part of its time is left."""

STALE_KERNEL_TIMEOUT_S: Final = 1.0
"""How long the kernel may keep what is served only because no master answers."""

RETRY_S: Final = 1.0
"""After a listing failed because nobody answered: no further attempt for at least this long (up to twice)."""

NO_ANSWER_S: Final = 5.0
"""When a folder could be served stale and no master answered anything for this long, it is: a listing may try for
the whole budget of a request (minutes), and every reader would stand still as long."""

NEGATIVE_KERNEL_TIMEOUT_S: Final = 1.0
"""How long the kernel may keep "no such name" in a folder that is not listed (yet)."""

PATIENT_ENTRIES: Final = 20_000
"""Look-ups wait for the new listing of a due folder of up to so many entries (under a second); in a larger one
GetStatus answers for the one name meanwhile."""

INCOMPLETE_ASK_S: Final = 1.0
"""An incomplete file is asked for again at most this often."""


_LISTING: Final = struct.Struct("<Qd")


def jitter_of(folder: int, asked_at: float) -> float:
    """The jitter in [0, 1) of a listing: the same in every process that knows it, another one on every node."""
    return zlib.crc32(_LISTING.pack(folder, asked_at)) / 2**32


class DatasetRule(NamedTuple):
    """A folder with its own rules; None = as the mount."""

    path: bytes
    """Absolute Alluxio path."""
    immutable: bool | None = None
    refresh_s: float | None = None


class FolderRule(NamedTuple):
    """What holds for one folder."""

    refresh_s: float
    immutable: bool


@dataclass(frozen=True)
class FreshnessPolicy:
    """The mount's settings about age; every time in seconds."""

    refresh_s: float = 600.0
    immutable: bool = False
    immutable_kernel_timeout_s: float = 86400.0
    stale_if_error_s: float = 3600.0
    negative_s: float = 60.0
    """How long "no such name" is remembered for a folder that is not listed."""
    sync_interval_s: float = 300.0
    """Alluxio compares a folder with its UFS when its last comparison is older; negative = never."""
    refresh_calls_per_s: float = 5.0
    datasets: Sequence[DatasetRule] = ()

    @property
    def sync_interval_ms(self) -> int:
        """As Alluxio takes it: milliseconds, -1 = never."""
        return -1 if self.sync_interval_s < 0 else int(self.sync_interval_s * 1000)

    def rule_for(self, path: bytes) -> FolderRule:
        """The rule of the folder at `path`: that of the data set with the longest path above or at it."""
        best: DatasetRule | None = None
        for dataset in self.datasets:
            if _covers(dataset.path, path) and (best is None or len(dataset.path) > len(best.path)):
                best = dataset
        refresh_s, immutable = self.refresh_s, self.immutable
        if best is not None:
            refresh_s = refresh_s if best.refresh_s is None else best.refresh_s
            immutable = immutable if best.immutable is None else best.immutable
        return FolderRule(refresh_s, immutable)

    def fresh_until(self, rule: FolderRule, asked_at: float, jitter: float) -> float:
        """When a listing asked for at `asked_at` comes due; `jitter` in [0, 1)."""
        if rule.immutable:
            return math.inf
        return asked_at + rule.refresh_s * (1.0 - JITTER * jitter)

    def stale_until(self, rule: FolderRule, asked_at: float) -> float:
        """Until when a listing asked for at `asked_at` may be served while no master answers."""
        return asked_at + rule.refresh_s + self.stale_if_error_s

    def refresh_at(self, rule: FolderRule, fresh_until: float) -> float:
        """When the background refresher should list a folder in use that comes due at `fresh_until`."""
        return fresh_until - rule.refresh_s * AHEAD

    def kernel_timeout_s(self, rule: FolderRule, fresh_until: float, now: float) -> float:
        """How long the kernel may keep an entry of a folder that is due at `fresh_until`."""
        if rule.immutable:
            return self.immutable_kernel_timeout_s
        return max(0.0, fresh_until - now)


def _covers(folder: bytes, path: bytes) -> bool:
    folder = folder.rstrip(b"/")
    return path == folder or path.startswith(folder + b"/")
