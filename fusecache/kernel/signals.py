"""Signals as a descriptor that becomes readable: the supervisor handles them in its loop, between two other things.

Python's wakeup descriptor gets one byte a signal, its number. signalfd(2) would need masks that children inherit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence


def has_terminal() -> bool:
    """Whether this process has a controlling terminal now.

    Then SIGHUP says what it was made for: the terminal is closed, and what runs there ends. A daemon has none, and by
    convention reads its configuration again.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Signals:
    """The signals of this process from now on; one object a process."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        """Take over `numbers`; SIGHUP stays ignored where it is (nohup)."""
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """For poll."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """What came since the last call; SIGCHLD once at most."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            numbers = list(self._reader.recv(4096))
        return [signal.Signals(number) for number in dict.fromkeys(numbers)]

    def wait(self, within_s: float) -> None:
        """Until one comes, at most `within_s` seconds."""
        select.select([self._reader], [], [], within_s)
