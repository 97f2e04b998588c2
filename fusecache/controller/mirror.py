"""A kind of API objects kept as projections in memory: listed once, then watched.

A watch is resumed from the last resource version it saw. When the server no longer knows that version (410), and at
the first start, everything is listed again: objects that are gone then vanish here too. While the server can't be
reached the mirror stays as it was, and says since when.

Runs on the event loop; `on_change` is called there after every change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import structlog

from fusecache.controller.kube import KubeApi
from fusecache.errors import CoSchedulingError, WatchExpired
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
RESUME_PAUSE_S = 0.05
"""After a watch that the server ended as it should: one that ends them at once must not be asked without a pause."""


class Projected(Protocol):
    """What a projection must tell of itself."""

    @property
    def key(self) -> str:
        """Unique name."""
        ...

    @property
    def resource_version(self) -> str:
        """Of the object it was made from."""
        ...


Value = TypeVar("Value", bound=Projected)


class Mirror(Generic[Value]):
    """All objects of one kind."""

    def __init__(
        self,
        api: KubeApi,
        path: str,
        project: Callable[[Mapping[str, Any]], Value],
        on_change: Callable[[], None],
        metrics: Metrics,
        select: Callable[[Value], bool] = lambda value: False,
    ) -> None:
        """`select` says which values are kept in `selected` too."""
        self._api = api
        self._path = path
        self._project = project
        self._on_change = on_change
        self._select = select
        self._listed = metrics.counter("fusecache_controller_lists_total", resource=path.rpartition("/")[2])
        self.values: dict[str, Value] = {}
        """By key."""
        self.selected: dict[str, Value] = {}
        """Those that `select` wants: a few of very many."""
        self.synced = asyncio.Event()
        """Set once everything was listed."""
        self.trouble = ""
        """Why the server can't be followed now; empty when it can."""

    async def run(self) -> None:
        """Follow the server until cancelled."""
        pause_s = FIRST_PAUSE_S
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                async for event in self._api.watch(self._path, version):
                    version = event.item["metadata"]["resourceVersion"]
                    pause_s, self.trouble = FIRST_PAUSE_S, ""
                    self._apply(event.kind, event.item)
                self.trouble = ""
                await asyncio.sleep(RESUME_PAUSE_S)
                continue
            except WatchExpired:
                log.info("listing_again", resource=self._path)
                version = ""
            except CoSchedulingError as failure:
                self.trouble = str(failure)
                log.warning("watch_failed", resource=self._path, error=failure)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def put(self, raw: Mapping[str, Any]) -> None:
        """Take the answer to a write of ours, ahead of the watch; unless the object is gone meanwhile."""
        if self._project(raw).key in self.values:
            self._apply("MODIFIED", raw)

    async def _list(self) -> str:
        listing = await self._api.list_objects(self._path)
        values = (self._project(item) for item in listing.items)
        self.values = {value.key: value for value in values}
        self.selected = {key: value for key, value in self.values.items() if self._select(value)}
        self._listed.inc()
        self.trouble = ""
        self.synced.set()
        self._on_change()
        return listing.resource_version

    def _apply(self, kind: str, item: Mapping[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        value = self._project(item)
        known = self.values.get(value.key)
        if known is not None and _older(value.resource_version, known.resource_version):
            return  # the watch tells of a change before ours, which `put` has taken already
        self.selected.pop(value.key, None)
        if kind == "DELETED":
            self.values.pop(value.key, None)
        else:
            self.values[value.key] = value
            if self._select(value):
                self.selected[value.key] = value
        self._on_change()


def _older(first: str, second: str) -> bool:
    """Resource versions of one server are ordered numbers (stated by the API since 1.35); others are never older."""
    return first.isdecimal() and second.isdecimal() and int(first) < int(second)
