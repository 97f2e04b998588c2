"""Which folders to list again before anybody has to wait for it, and how fast.

A folder that was used since it was last listed is *in use*: its time to be listed again (`Agenda`) comes a
little before it is due, so that the next request finds it fresh. A folder nobody asked about since is let go;
whoever asks later waits for one listing. `TokenBucket` caps the calls: many nodes share one master that answers
some hundred calls a second.

Pure: both are told the time. The tree runs them.
"""

from __future__ import annotations

import heapq


class TokenBucket:
    """At most `per_s` calls a second on average, bursts of up to one second's worth; 0 = none at all."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s) if per_s > 0 else 0.0
        self._tokens = self._burst
        self._at = now

    def take(self, now: float, *, may_owe: bool = False) -> float:
        """Take a call. Returns 0.0 when taken, else the seconds until one is available.

        `may_owe`: a call that can't wait (a request does); it is counted, and the background pays for it.
        """
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        # A hair less than one counts: who waits exactly as long as told must not be told to wait 1e-17 s more.
        if self._tokens > 1.0 - 1e-6 or may_owe:
            self._tokens = max(self._tokens - 1.0, -self._burst)
            return 0.0
        return (1.0 - self._tokens) / self._per_s if self._per_s > 0 else float("inf")


class Agenda:
    """Folders by the time at which they should be listed again; one time per folder, the latest set counts."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._times: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, folder: int) -> bool:
        return folder in self._times

    def set(self, folder: int, at: float) -> None:
        """List `folder` again at `at`."""
        self._times[folder] = at
        heapq.heappush(self._heap, (at, folder))
        if len(self._heap) > 2 * len(self._times) + 64:  # mostly outdated times
            self._heap = [(time, known) for known, time in self._times.items()]
            heapq.heapify(self._heap)

    def drop(self, folder: int) -> None:
        """Never mind."""
        self._times.pop(folder, None)

    def next_at(self) -> float | None:
        """When the next one comes up, None when there is none."""
        while self._heap:
            at, folder = self._heap[0]
            if self._times.get(folder) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> int | None:
        """A folder whose time has come; it is no longer on the agenda."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, folder = heapq.heappop(self._heap)
        del self._times[folder]
        return folder
