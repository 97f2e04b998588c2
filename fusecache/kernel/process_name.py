"""What ps(1) and top(1) show of a part: `fusecache: gate /mnt/data` instead of an interpreter's command line.

The text lies where the kernel put argv, so the command line gives the room; Python reads argv at its start only. The
short name (15 bytes, `ps -o comm`, `top`) is set with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

_PR_SET_NAME: Final = 15
_ARG_START: Final = 45
_ARG_END: Final = 46
"""Fields 48 and 49 of /proc/self/stat (man 5 proc), counted from the one after the name in brackets."""


def set_process_name(part: str, mountpoint: str) -> None:
    """Show this process as `fusecache: PART MOUNTPOINT`, cut to the room there is; where that fails nothing changes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        room = end - start
        if start and room > 1:
            text = os.fsencode(f"fusecache: {part} {mountpoint}").replace(b"\0", b"?")
            ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"fc-{part}".encode("ascii", "replace")[:15], 0, 0, 0)
