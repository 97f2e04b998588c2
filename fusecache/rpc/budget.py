"""Two limits on every wait: a total budget for the operation and a deadline for each try in it.

A `Budget` is made where an operation enters (a kernel request, a command) and handed down; whoever calls a
network asks it for the deadline of the next try. Nothing here sleeps or retries: `rpc.retry` does.
"""

from __future__ import annotations

from fusecache.clock import Clock


class Budget:
    """Time left for one operation, in seconds of `clock`."""

    __slots__ = ("_clock", "_end", "total_s")

    def __init__(self, clock: Clock, total_s: float) -> None:
        self._clock = clock
        self.total_s = total_s
        self._end = clock.now() + total_s

    def remaining_s(self) -> float:
        """Seconds left, 0.0 when spent."""
        return max(0.0, self._end - self._clock.now())

    def spent(self) -> bool:
        """True when nothing is left."""
        return self._clock.now() >= self._end

    def part(self, limit_s: float) -> Budget:
        """A budget of `limit_s` for one step, or of what is left when that is less: something else can still be tried
        after it."""
        return Budget(self._clock, min(limit_s, self.remaining_s()))

    def per_try_s(self, limit_s: float) -> float:
        """Deadline for one try: `limit_s`, or what is left when that is less (at least 1 ms)."""
        return max(0.001, min(limit_s, self.remaining_s()))
