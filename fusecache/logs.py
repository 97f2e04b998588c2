"""Logging of our processes: structlog events as text on a terminal and as JSON lines elsewhere.

`configure` is called once by whoever starts a process; every module then uses `structlog.get_logger(__name__)`.
An event passes, in order: the level threshold (`set_level` moves it at run time, for loggers that exist already
too), the repeat limit (the same failure once per `REPEAT_S`, the next one with how many were left out: a failing disk
must not fill another one), then secrets are hidden and long texts cut. Records of the standard
library's `logging` (grpc, trio) take the same way.

Nothing here runs on the read path. A log stream that can't be written loses lines, never a request.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from fusecache.clock import Clock, SystemClock

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
REPEAT_S = 10.0
"""One event of a kind per this time, in seconds: seen at once, and at most 6 lines a minute."""

MAX_KINDS = 1000
"""Kinds of event remembered by the repeat limit; the oldest are forgotten first."""

MAX_TEXT = 256
"""Characters of one value: servers put whole stack traces into error texts."""

MAX_TRACEBACK = 16 * 1024
"""Characters of one traceback of ours."""

_NUMBERS: Final[dict[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50, "exception": 40}
_SECRET = re.compile(r"password|passwd|secret|token|credential|authorization|private_key", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _Threshold:
    """The current level, shared by all loggers of the process."""

    def __init__(self) -> None:
        self.number = _NUMBERS["info"]

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if _NUMBERS.get(method, 0) < self.number:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


class RepeatLimit:
    """Processor that lets one event of a kind (level and event name) through per `interval_s`.

    Failures only (warning and above): what it left out is counted and told by the next one that passes
    (`suppressed=...`). Info tells of single things, such as each of several mounts; debug was asked for.
    """

    def __init__(self, clock: Clock, interval_s: float = REPEAT_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        """Kind -> (when one last passed, how many were left out since)."""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Pass the event, or raise DropEvent."""
        if _NUMBERS.get(method, 0) < _NUMBERS["warning"]:
            return event
        kind = (method, str(event.get("event")))
        now = self._clock.now()
        with self._lock:
            passed_at, suppressed = self._seen.get(kind, (None, 0))
            if passed_at is not None and now - passed_at < self._interval_s:
                self._seen[kind] = (passed_at, suppressed + 1)
                raise structlog.DropEvent
            self._seen[kind] = (now, 0)
            self._seen.move_to_end(kind)
            while len(self._seen) > MAX_KINDS:
                self._seen.popitem(last=False)
        if suppressed:
            event["suppressed"] = suppressed
        return event


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """`text` with at most `limit` characters and no control characters; says how much was left out."""
    shown = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text[:limit])
    return shown if len(text) <= limit else f"{shown}... ({len(text) - limit} more)"


def clean(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Processor: hide secrets, make bytes readable, cut long values, keep every event on one line."""
    for key, value in event.items():
        if _SECRET.search(key):
            event[key] = "***"
        elif isinstance(value, bytes):
            event[key] = cut(value.decode("utf-8", "backslashreplace"))
        elif key == "exception":
            event[key] = str(value)[-MAX_TRACEBACK:]  # the end of a traceback says what happened
        elif isinstance(value, str):
            event[key] = cut(value)
        elif isinstance(value, BaseException):
            event[key] = cut(f"{type(value).__name__}: {value}")
    return event


def configure(level: Level, form: Format = "auto", *, stream: TextIO | None = None, clock: Clock | None = None) -> None:
    """Set logging of this process up; a second call replaces the first. `stream` None = standard error, each time."""
    set_level(level)
    target = stream if stream is not None else sys.stderr
    text = form == "console" or (form == "auto" and target.isatty())
    renderer: Processor
    if text:
        renderer = structlog.dev.ConsoleRenderer(
            colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        renderer = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[
            _threshold,
            RepeatLimit(clock or SystemClock()),
            structlog.processors.add_log_level,
            _add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            clean,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda name="": _LineLogger(str(name), stream),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())


def set_level(level: Level) -> None:
    """Move the threshold, for existing loggers too."""
    _threshold.number = _NUMBERS[level]
    # Libraries that speak through `logging` are heard from warnings up, unless everything was asked for.
    logging.getLogger().setLevel(_threshold.number if level == "debug" else max(_threshold.number, logging.WARNING))


def level() -> str:
    """The current threshold's name."""
    return next(name for name in LEVELS if _NUMBERS[name] == _threshold.number)


class _LineLogger:
    """Writes one line per event; what structlog's bound loggers wrap."""

    def __init__(self, name: str, stream: TextIO | None) -> None:
        self.name = name
        self._stream = stream

    def msg(self, line: str) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        # Full disk, closed pipe, closed stream at exit: there is nowhere left to say so.
        with contextlib.suppress(OSError, ValueError):
            stream.write(line + "\n")
            stream.flush()

    log = debug = info = warning = warn = error = critical = exception = fatal = failure = msg


class _ToStructlog(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        structlog.get_logger(record.name).log(record.levelno, record.getMessage(), **fields)


def _add_logger_name(logger: WrappedLogger, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    name = getattr(logger, "name", "")
    if name:
        event.setdefault("logger", name)
    return event
