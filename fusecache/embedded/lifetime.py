"""How long the embedded server's process lives: until a signal, or as a mount's child until the mount is gone.

    with Lifetime(child=True) as lifetime:
        with EmbeddedServer(...):
            ...
            lifetime.wait()

A child ends when its standard input does (the parent holds the other end), and when its parent dies in any other
way (PR_SET_PDEATHSIG), so that it never outlives what it serves. Signals count from the `with` line on: one that
comes while the server still starts ends it as soon as it waits.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, BinaryIO

import structlog

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


class Lifetime:
    """Signal handlers of the main thread, and one wait for the end."""

    def __init__(self, *, child: bool, stdin: BinaryIO | None = None) -> None:
        """`child`: end with standard input (or `stdin`) and with the parent too."""
        self._child = child
        self._stdin = stdin
        self._parent = os.getppid()
        self._wake = (-1, -1)
        self._previous_wake = -1
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Lifetime:
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_wake = signal.set_wakeup_fd(self._wake[1])
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if self._child else (signal.SIGINT, signal.SIGTERM)
        self._previous = {number: signal.signal(number, _noted) for number in numbers}
        if self._child:
            _hear_of_parents_death()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wake)
        for descriptor in self._wake:
            os.close(descriptor)

    def wait(self) -> str:
        """Sleep until the end has come; its reason in words. Uses no CPU."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake[0], selectors.EVENT_READ)
            if self._child:
                selector.register(self._stdin or sys.stdin.buffer, selectors.EVENT_READ)
            while not self._child or os.getppid() == self._parent:
                for key, _ in selector.select():
                    if key.fd != self._wake[0]:
                        if not os.read(key.fd, 4096):
                            return "end of standard input"
                    elif signals := set(os.read(key.fd, 4096)) - {signal.SIGHUP}:
                        return signal.Signals(min(signals)).name
            return "end of the parent"


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Signals are read from the wake-up descriptor; this only keeps Python from their defaults."""


def _hear_of_parents_death() -> None:
    """Let the kernel send SIGHUP when the thread that started this process ends.

    Thread, not process: one of a thread pool may end long before its process, so the signal is only a reason
    to look whether the parent is still there.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0) != 0:
        log.warning("PR_SET_PDEATHSIG failed", errno=ctypes.get_errno())
