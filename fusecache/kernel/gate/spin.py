"""How long the gate looks for the next request before it sleeps. Pure: the time is an argument.

Being woken costs more than answering: with 50 us of looking after the last request, passthrough opens on one thread
were twice as fast. Only while traffic flows: `us` after the last request it sleeps. Of each WINDOW_S at most
MOST_SHARE is spent so, because on a small machine the clients and workers need that CPU.
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 0.1
MOST_SHARE: Final = 0.5


class Spin:
    """The budget; all times in seconds of one clock."""

    def __init__(self, us: int) -> None:
        """`us`: microseconds after the last request; 0 switches it off."""
        self.us = us
        self._most_s = us / 1e6
        self._window_end_s = 0.0
        self._left_s = 0.0
        self.spent_s = 0.0
        """In total, for the counters."""

    def until_s(self, last_request_s: float, now_s: float) -> float:
        """Look for requests until then; a time that is over: sleep."""
        end_s = last_request_s + self._most_s
        if now_s >= end_s:
            return 0.0
        if now_s >= self._window_end_s:
            self._window_end_s = now_s + WINDOW_S
            self._left_s = WINDOW_S * MOST_SHARE
        if self._left_s <= 0:
            return 0.0
        return end_s

    def spent(self, seconds: float) -> None:
        """So long was looked for requests."""
        self._left_s -= seconds
        self.spent_s += seconds
