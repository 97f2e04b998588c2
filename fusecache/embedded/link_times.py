"""Which change time each hard-linked source file must still have: shared by all block stores of a server.

Linking and unlinking move a file's change time, and two block workers may link the same file, so one table
follows what we do ourselves; any other movement means that somebody touched the file. Keyed by inode number:
block files and sources lie on one file system, otherwise there are no links. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class LinkTimes:
    """Change time and number of our links, by inode number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()

    def adopt(self, found: os.stat_result) -> None:
        """Trust a link of an earlier run as it is found; the caller has compared length and modification time."""
        with self._lock:
            _, links = self._known.get(found.st_ino, (0, 0))
            self._known[found.st_ino] = (found.st_ctime_ns, links + 1)

    def trusted(self, found: os.stat_result) -> bool:
        """Whether nobody else has touched the file since it was linked.

        A moved change time is accepted when our links are the only names left: removing the source's name
        moves it, and without a name the content can't be replaced any more.
        """
        with self._lock:
            known = self._known.get(found.st_ino)
            if known is None:
                return False
            ctime_ns, links = known
            if found.st_ctime_ns != ctime_ns:
                if found.st_nlink != links:
                    return False
                self._known[found.st_ino] = (found.st_ctime_ns, links)
            return True

    @contextlib.contextmanager
    def changing(self, descriptor: int, links_change: int) -> Iterator[None]:
        """Around our own link (+1) or unlink (-1) of an open file: keeps trust that was there before."""
        with self._lock:
            before = os.fstat(descriptor)
            ctime_ns, links = self._known.get(before.st_ino, (before.st_ctime_ns, 0))
            trusted = links == 0 or self.trusted(before)
            yield
            after = os.fstat(descriptor)
            if links + links_change <= 0:
                self._known.pop(before.st_ino, None)
            else:
                # A distrusted file keeps its old time, which no later one can equal.
                self._known[before.st_ino] = (after.st_ctime_ns if trusted else ctime_ns, links + links_change)
