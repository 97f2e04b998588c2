"""Time as a parameter: everything that waits or ages takes a `Clock`, so that tests can move it.

`now` is CLOCK_BOOTTIME in seconds: monotonic, and it goes on while the machine sleeps, so that metadata
does not look fresh after a suspend. `boot_id` tells one boot from the next: a time kept on disk is
comparable only under the same boot id. Wall-clock time is used for nothing that decides.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What the rest of the code may ask about time."""

    def now(self) -> float:
        """Seconds since boot, never going back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread; never called on the event loop."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """CLOCK_BOOTTIME in seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds`."""
        time.sleep(seconds)


def boot_id() -> str:
    """The kernel's id of this boot (random, 36 characters)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
