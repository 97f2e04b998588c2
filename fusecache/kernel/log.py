"""Log lines of the supervisor and the gate: JSON on standard error, as `fusecache.logs` writes them elsewhere.

A logger of its own because these two import the standard library only. Same fields (timestamp, level, logger, event)
and the same rules: warnings and errors of one kind once per REPEAT_S with a count of what was left out, texts cut,
one event a line. A line that the stream does not take at once is lost, and counted in the next one: standard error is a
pipe whose reader may have stopped, and whoever waits for it makes every caller of the mount wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import Any, Final

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
REPEAT_S: Final = 10.0
MAX_KINDS: Final = 1000
"""Kinds of event remembered for the repeat limit; all are forgotten when there are more."""

MAX_TEXT: Final = 256
"""Characters of one value."""

MAX_LINE_BYTES: Final = select.PIPE_BUF
"""A pipe that poll(2) calls writable takes so many at once."""

STANDARD_ERROR: Final = 2


class Log:
    """One part's logger, on standard error."""

    def __init__(self, name: str, level: str = "info", descriptor: int = STANDARD_ERROR) -> None:
        self.name = name
        self.threshold = LEVELS[level]
        self._descriptor = descriptor
        self._lost = 0
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """Kind -> (when one last passed, how many were left out since)."""

    def debug(self, event: str, **fields: Any) -> None:
        """What only a search for a fault needs."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """A step of the part's life."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something is worse than it should be; requests are still answered."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Somebody gets an error because of it."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] < self.threshold:
            return
        if LEVELS[level] >= LEVELS["warning"]:
            suppressed = self._suppressed(level, event)
            if suppressed is None:
                return
            if suppressed:
                fields = {**fields, "suppressed": suppressed}
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1e6):06d}Z"
        line: dict[str, Any] = {"timestamp": stamp, "level": level, "logger": self.name, "event": event}
        if self._lost:
            line["lost"] = self._lost
        line.update((key, _cut(value)) for key, value in fields.items())
        data = json.dumps(line, default=repr).encode()
        if write_line(self._descriptor, data[: MAX_LINE_BYTES - 1] + b"\n"):
            self._lost = 0
        else:
            self._lost += 1

    def _suppressed(self, level: str, event: str) -> int | None:
        """How many of this kind were left out before this one; None when this one is left out too."""
        now_s = time.monotonic()
        passed_at_s, suppressed = self._seen.get((level, event), (-REPEAT_S, 0))
        if now_s - passed_at_s < REPEAT_S:
            self._seen[level, event] = (passed_at_s, suppressed + 1)
            return None
        if len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[level, event] = (now_s, 0)
        return suppressed


def write_line(descriptor: int, line: bytes) -> bool:
    """Write at most MAX_LINE_BYTES, or nothing where that would wait or fails (full disk, closed pipe)."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        if any(events & select.POLLOUT for _, events in poll.poll(0)):
            os.write(descriptor, line)
            return True
    return False


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}... ({len(value) - MAX_TEXT} more)"
    return value
