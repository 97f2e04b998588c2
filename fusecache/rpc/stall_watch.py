"""Ends waits that last too long: one thread looks after all live streams.

grpcio can't wait for the next message of a stream with a time limit, and a `threading.Timer` per wait costs a
thread each. So whoever waits writes down until when (`Watched.deadline`), and the watch cancels the call that is
past it; the waiter's `next()` then raises and `fired` tells why. The thread sleeps for ever while no stream is
registered: an idle client uses no CPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from fusecache.clock import Clock

NEVER = math.inf


class Watched:
    """One call under watch. The owner sets `deadline` before it waits and back to `NEVER` after."""

    __slots__ = ("_cancel", "deadline", "fired")

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self.deadline = NEVER
        self.fired = False

    def fire(self) -> None:
        """Cancel the call; its owner sees `fired`."""
        self.fired = True
        self._cancel()


class StallWatch:
    """Cancels calls whose owner has waited past the deadline it set, at most `tick_s` late."""

    def __init__(self, clock: Clock, *, tick_s: float = 0.25) -> None:
        self._clock = clock
        self._tick_s = tick_s
        self._condition = threading.Condition()
        self._live: set[Watched] = set()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, cancel: Callable[[], object]) -> Watched:
        """Put a call under watch; `cancel` must be thread-safe, quick and idempotent."""
        watched = Watched(cancel)
        with self._condition:
            closed = self._closed
            if not closed:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)
                    thread.start()  # RuntimeError when there is no thread to be had: the next call tries again
                    self._thread = thread
                self._live.add(watched)
                if self._asleep:
                    # Not for every call: while calls come one after the other the thread looks by itself every tick.
                    self._asleep = False
                    self._condition.notify()
        if closed:
            watched.fire()
        return watched

    @property
    def closed(self) -> bool:
        """True once whoever owns the calls has ended."""
        return self._closed

    def remove(self, watched: Watched) -> None:
        """The call has ended."""
        with self._condition:
            self._live.discard(watched)

    def close(self) -> None:
        """Cancel what is live and end the thread."""
        with self._condition:
            self._closed = True
            live = list(self._live)
            self._live.clear()
            self._condition.notify()
            thread = self._thread
        for watched in live:
            watched.fire()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._asleep = not self._live
                self._condition.wait(self._tick_s if self._live else None)
                if self._closed:
                    return
                now = self._clock.now()
                late = [watched for watched in self._live if watched.deadline <= now]
                self._live.difference_update(late)
            for watched in late:
                watched.fire()
