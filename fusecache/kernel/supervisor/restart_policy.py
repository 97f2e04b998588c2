"""When a part that died is started again, and when it counts as crash-looping. Pure; times are given.

A death counts when it came before the part was ready, or less than HEALTHY_S after. COUNTED_DEATHS of them within
WINDOW_S are a crash loop, which lasts until the part has been healthy: it is then tried every LOOP_DELAY_S. A kill of a
healthy part never counts, however often it comes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

HEALTHY_S: Final = 1.0
COUNTED_DEATHS: Final = 3
WINDOW_S: Final = 10.0
LOOP_DELAY_S: Final = 10.0


class Verdict(NamedTuple):
    """What follows from a death."""

    delay_s: float
    """Until the next start."""

    looping: bool


class RestartPolicy:
    """The memory of one part. `first_delay_s` is doubled with each death that counts, up to LOOP_DELAY_S."""

    def __init__(self, first_delay_s: float = 0.0) -> None:
        self.looping = False
        self._first_delay_s = first_delay_s
        self._counted: list[float] = []

    def died(self, now_s: float, ready_at_s: float | None) -> Verdict:
        """The part died at `now_s`, having been ready since `ready_at_s` (None: never)."""
        if self.is_healthy(now_s, ready_at_s):
            self.looping = False
            self._counted.clear()
            return Verdict(0.0, False)
        self._counted = [when for when in self._counted if now_s - when < WINDOW_S] + [now_s]
        self.looping = self.looping or len(self._counted) >= COUNTED_DEATHS
        if self.looping:
            return Verdict(LOOP_DELAY_S, True)
        return Verdict(min(self._first_delay_s * 2 ** (len(self._counted) - 1), LOOP_DELAY_S), False)

    @property
    def counted_deaths(self) -> int:
        """Deaths that counted within WINDOW_S before the last one."""
        return len(self._counted)

    @staticmethod
    def is_healthy(now_s: float, ready_at_s: float | None) -> bool:
        """Whether a part that is ready since then has lived long enough for its death not to count."""
        return ready_at_s is not None and now_s - ready_at_s >= HEALTHY_S
