"""Carries what changed to whoever must tell the kernel.

`on_change` is called in a thread, one change at a time, in the order the listings were committed, never on the
event loop; it may block (a kernel notification can, while a LOOKUP in that folder is being answered, which is
why no request waits for it; only `MetadataTree.refresh` does). A receiver that raises is logged and gets the
next change.

After a flip (see `cache.store`) the two shelves are compared here, in name order and bounded memory, before the
old one is given to the sweeper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import structlog
import trio

from fusecache.cache import listing
from fusecache.cache.listing_diff import Change, Diff
from fusecache.cache.record import Entry
from fusecache.cache.store import MetadataStore
from fusecache.errors import Unavailable
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)


@dataclass
class Delivery:
    """Changes on their way."""

    diff: Diff
    """What changed; after a flip only counted once `done` is set."""
    folder: Entry | None = None
    """The folder itself: it is told too when names changed."""
    shelves: tuple[int, int, int] | None = None
    """(folder, old shelf, new shelf) to compare."""
    done: trio.Event = field(default_factory=trio.Event)


class Pusher:
    """The queue of deliveries and the thread behind it."""

    def __init__(self, store: MetadataStore, on_change: Callable[[Change], None], swept: Callable[[], None]) -> None:
        """`swept` is called on the event loop when a shelf became free to be swept."""
        self._store = store
        self._on_change = on_change
        self._swept = swept
        self._limiter = trio.CapacityLimiter(1)
        self._send, self._receive = trio.open_memory_channel[Delivery](math.inf)

    def push(self, delivery: Delivery) -> None:
        """Queue a delivery; one without any change is done at once."""
        if delivery.shelves is None and not delivery.diff.total:
            delivery.done.set()
        else:
            self._send.send_nowait(delivery)

    def push_changes(self, changes: Sequence[Change], folder: Entry | None) -> None:
        """Queue single changes in one folder."""
        diff = Diff()
        for change in changes:
            diff.count(change)
        self.push(Delivery(diff, folder))

    async def run(self) -> NoReturn:
        """Deliver until cancelled; what is queued then is dropped (the kernel's timeouts end what it keeps)."""
        async for delivery in self._receive:
            while True:
                try:
                    await in_thread(self._deliver, delivery, limiter=self._limiter)
                    break
                except Unavailable:
                    # What the kernel is not told it would keep for hours.
                    log.warning("changes wait for a thread to be delivered")
            delivery.done.set()
            if delivery.shelves is not None:
                self._store.held_shelves.discard(delivery.shelves[1])
                self._swept()
        raise AssertionError("unreachable: the sending end is never closed")

    def _deliver(self, delivery: Delivery) -> None:
        for change in list(delivery.diff.changes):
            self._tell(change)
        if delivery.shelves is not None:
            for change in listing.shelf_changes(self._store, *delivery.shelves):
                delivery.diff.count(change)
                self._tell(change)
        folder = delivery.folder
        if folder is not None and delivery.diff.names_changed:
            self._tell(Change("folder", folder.parent, folder.name, folder.inode))

    def _tell(self, change: Change) -> None:
        try:
            self._on_change(change)
        except Exception:
            # A receiver that fails for one change must not lose the kernel all those after it.
            log.exception("a change could not be delivered", kind=change.kind, inode=change.inode)
