"""Clocks that stand until a test moves them."""

from __future__ import annotations


class MovedClock:
    """Time passes when the test says so, or by sleeping."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_s += seconds


class LoopClock(MovedClock):
    """Of an event loop: nobody may sleep by it."""

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing may block the thread here")
