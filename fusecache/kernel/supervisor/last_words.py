"""How a mount ended; when it failed, it says why: on the ready pipe, for a parent that waits, and on standard error.

The line on the pipe is the one that `ready_pipe` reads: `error EXIT_CODE TEXT`.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from fusecache.kernel.log import MAX_LINE_BYTES, STANDARD_ERROR, write_line


class Outcome(NamedTuple):
    """How a mount ended."""

    exit_code: int = 0
    error: str = ""
    """Empty: as it was asked to."""


def say(outcome: Outcome, ready_fd: int | None) -> None:
    """Tell both of an error, on one line each. `ready_fd` is None once the mount was ready: nobody waits any more."""
    text = " ".join(outcome.error.split())
    if not text:
        return
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # the parent was killed
            os.write(ready_fd, _line(f"error {outcome.exit_code} {text}"))
    write_line(STANDARD_ERROR, _line(f"fusecache: {text}"))


def _line(text: str) -> bytes:
    return text.encode(errors="replace")[: MAX_LINE_BYTES - 1] + b"\n"
