"""How a child process tells its parent that its mount is ready, or why it never will be. Standard library only.

One line on an inherited pipe: `ready`, or `error <exit code> <text>`. The pipe's end without a line means that the
child died; its exit code says the rest. Used by `mount --daemon` (`daemon.background`), by `serve`, and where a mount
is reloaded (`takeover.reloading`).
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

MAX_LINE = 4096
"""Bytes of the line: PIPE_BUF, so that it is written at once and never blocks."""


class Report(NamedTuple):
    """What a child said."""

    ready: bool
    exit_code: int
    error: str


class ReadyPipe:
    """The child's end: says one of the two, once. Without a descriptor (no parent waits) it says nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)  # a grandchild must not keep the parent waiting

    def ready(self) -> None:
        """Reads work."""
        self._say(b"ready\n")

    def error(self, exit_code: int, text: str) -> None:
        """It failed before reads worked."""
        line = f"error {exit_code} {' '.join(text.split())}".encode(errors="replace")
        self._say(line[: MAX_LINE - 1] + b"\n")

    def keep_over_exec(self) -> int | None:
        """Its descriptor, which a program that replaces this one goes on with; None when no parent waits."""
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, True)
        return self._descriptor

    def _say(self, line: bytes) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the parent was killed: nobody waits any more
            os.write(descriptor, line)
        os.close(descriptor)


def read_report(descriptor: int) -> Report | None:
    """What the child said; None when it died without a word. Blocks until either."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, MAX_LINE)
        if not piece:
            return None
        line += piece
    return parse_report(line)


def parse_report(line: bytes) -> Report | None:
    """A whole line of the pipe."""
    words = line.decode(errors="replace").strip().split(" ", 2)
    if words == ["ready"]:
        return Report(True, 0, "")
    if words[0] == "error" and len(words) == 3 and words[1].isdigit():
        return Report(False, int(words[1]), words[2])
    return None
