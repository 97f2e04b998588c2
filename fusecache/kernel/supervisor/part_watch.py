"""Does a part, gate or agent, still turn? Pure: times and answers are given, and a question or a verdict comes out.

It is asked QUESTIONS times within `silent_s`. Silence counts from the oldest question that was not answered, not from
the last answer, and anew from the first look of a supervisor that was stopped itself: with a frozen control group, or
a machine that stood still, the part was stopped too, may be with a question in its hands.
"""

from __future__ import annotations

from typing import Final, Literal

QUESTIONS: Final = 6
STOPPED_S: Final = 5.0
"""Between two looks, which are a second apart: who looks was stopped."""

Verdict = Literal["wait", "ask", "stuck"]


class PartWatch:
    """Of one process of a part after the other."""

    def __init__(self, silent_s: float, start_s: float) -> None:
        """`start_s`: for the first answer, when that is more than `silent_s`."""
        self._silent_s = silent_s
        self._start_s = start_s
        self._asked_at_s: float | None = None
        self._next_at_s = 0.0
        self._looked_at_s = 0.0
        self._has_answered = False

    def started(self) -> None:
        """Another process: what was asked of the last one does not count, and it is asked at once."""
        self._asked_at_s = None
        self._next_at_s = 0.0
        self._has_answered = False

    def answered(self) -> None:
        """It said something."""
        self._asked_at_s = None
        self._has_answered = True

    def look(self, now_s: float) -> Verdict:
        """What to do now. `stuck` is said once; the part then has `silent_s` to be gone before it is asked again."""
        if self._asked_at_s is not None and now_s - self._looked_at_s > STOPPED_S:
            self._asked_at_s = now_s
        self._looked_at_s = now_s
        limit_s = self._silent_s if self._has_answered else max(self._silent_s, self._start_s)
        if self._asked_at_s is not None and now_s - self._asked_at_s > limit_s:
            self._asked_at_s = None
            self._next_at_s = now_s + self._silent_s
            return "stuck"
        if now_s < self._next_at_s:
            return "wait"
        self._next_at_s = now_s + self._silent_s / QUESTIONS
        if self._asked_at_s is not None:
            return "wait"  # one question is enough: what is not answered would only pile up
        self._asked_at_s = now_s
        return "ask"
