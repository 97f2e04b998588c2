"""Many tasks want the same answer: one asks, all get it.

`SingleFlight.do(key, ask)` starts `ask` in a nursery that outlives every caller, so a caller that is cancelled
(an interrupted system call) takes nothing from the others. The answer, or the error, goes to every caller that
was waiting; it is not kept: the next call asks again.

It does not limit how many different keys are asked for at once; the thread limiter of the callers does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import outcome
import trio

from fusecache.errors import Unavailable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    __slots__ = ("answer", "landed")

    def __init__(self) -> None:
        self.landed = trio.Event()
        self.answer: outcome.Value[V] | outcome.Error | None = None


class SingleFlight(Generic[K, V]):
    """At most one running question per key that can be joined."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    def start(self, key: K, ask: Callable[[], Awaitable[V]]) -> None:
        """Ask in the background unless somebody already does. An error goes to whoever waits by then."""
        self._flight(key, ask)

    def depart(self, key: K) -> None:
        """From now on nobody joins the running question for `key`: what it asks, it asks now. `ask` calls this."""
        self._flights.pop(key, None)

    async def do(self, key: K, ask: Callable[[], Awaitable[V]]) -> V:
        """The answer of the running question for `key`, or of a new one. Raises what `ask` raised, and
        Unavailable when the nursery was closed first."""
        flight = self._flight(key, ask)
        await flight.landed.wait()
        if flight.answer is None:
            raise Unavailable("shut down while waiting for an answer")
        if isinstance(flight.answer, outcome.Error):
            # Every waiter raises the one exception object: without this its traceback would grow with each.
            raise flight.answer.error.with_traceback(None)
        return flight.answer.value

    def _flight(self, key: K, ask: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            try:
                self._nursery.start_soon(self._fly, key, flight, ask)
            except RuntimeError as exc:
                del self._flights[key]
                raise Unavailable("shut down") from exc
        return flight

    async def _fly(self, key: K, flight: _Flight[V], ask: Callable[[], Awaitable[V]]) -> None:
        try:
            try:
                flight.answer = outcome.Value(await ask())
            except Exception as exc:  # noqa: BLE001 - every kind goes to the waiters, who know what to do with it
                flight.answer = outcome.Error(exc)
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.landed.set()
