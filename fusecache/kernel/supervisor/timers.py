"""What the supervisor's loop does later: named actions, each at one time; setting a name again moves it."""

from __future__ import annotations

import time
from collections.abc import Callable

Action = Callable[[], None]


class Timers:
    """All of one loop."""

    def __init__(self) -> None:
        self._actions: dict[str, tuple[float, Action]] = {}

    def after(self, name: str, delay_s: float, action: Action) -> None:
        """Run `action` in `delay_s` seconds; an earlier one of the same name is replaced."""
        self._actions[name] = (time.monotonic() + delay_s, action)

    def cancel(self, name: str) -> None:
        """Forget an action, if there is one."""
        self._actions.pop(name, None)

    def clear(self) -> None:
        """Forget all."""
        self._actions.clear()

    def timeout_ms(self) -> int | None:
        """How long poll may wait; None when nothing is due ever."""
        if not self._actions:
            return None
        next_s = min(when for when, _ in self._actions.values())
        return max(0, int((next_s - time.monotonic()) * 1000) + 1)

    def run(self) -> None:
        """Do what is due, earliest first."""
        now_s = time.monotonic()
        for when, name in sorted((when, name) for name, (when, _) in self._actions.items()):
            # An action may have cancelled or moved a later one.
            if when <= now_s and self._actions.get(name, (None,))[0] == when:
                self._actions.pop(name)[1]()
