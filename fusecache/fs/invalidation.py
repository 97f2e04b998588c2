"""Pushes what changed into the kernel, from a thread that nothing waits for.

A notification can block for as long as a READ of that inode or a LOOKUP in that folder is in flight, so it is never
sent from the loop that answers them. Pending pushes are kept once each and bounded; when more than `MAX_PENDING` wait,
the oldest are dropped and counted: the kernel's timeouts, never longer than `refresh_s`, then end what it keeps.

How a notification reaches the kernel is the caller's: libfuse in `classic` mode (`session.notify`), the gate otherwise.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable

import structlog

from fusecache.cache.listing_diff import Change
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

MAX_PENDING = 100_000
"""About 20 MB of pending pushes."""

_NOBODY_THERE = frozenset((errno.ENOENT, errno.EBADF, errno.ENODEV, errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET))
"""The kernel does not know it, or there is no mount (any more), or no gate: it ends with the mount."""

Push = tuple[str, int, bytes]
"""(kind, inode or parent, name)."""


def pushes_of(change: Change) -> tuple[Push, ...]:
    """What the kernel has to forget because of `change`.

    A replaced or removed file loses its name, not its pages: whoever has it open goes on with the old version, whole,
    for as long as its bytes can be had. A folder is invalidated with its content (offset 0), because forgetting its
    attributes alone leaves a listing that the kernel kept.
    """
    if change.kind == "attributes":
        return (("attributes", change.inode, b""),)
    if change.kind == "folder":
        return (("inode", change.inode, b""),)
    return (("entry", change.parent, change.name),)


class Invalidator:
    """The pushing thread of one mount."""

    def __init__(self, metrics: Metrics, notify: Callable[[Push], None]) -> None:
        """`notify` gives one push to the kernel and may block; OSError when the kernel refuses it."""
        self._notify = notify
        self._counters = {
            kind: metrics.counter("fusecache_invalidations_total", kind=kind)
            for kind in ("entry", "inode", "attributes")
        }
        self._pending: OrderedDict[Push, None] = OrderedDict()
        self._wake = threading.Condition()
        self._closed = False
        self._busy = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="fusecache-invalidate", daemon=True)

    def start(self) -> None:
        """Start pushing; the mount must exist."""
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop; what is pending is dropped. A push that blocks is left to the end of the session."""
        with self._wake:
            self._closed = True
            self._pending.clear()
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def change(self, change: Change) -> None:
        """Queue what the kernel must forget because of a change in a folder; any thread."""
        for push in pushes_of(change):
            self.push(push)

    def push(self, push: Push) -> None:
        """Queue one notification."""
        with self._wake:
            if self._closed:
                return
            self._pending[push] = None
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
                self.dropped += 1
            self._wake.notify()

    def idle(self) -> bool:
        """True when nothing is pending or being pushed (a refresh waits for that)."""
        with self._wake:
            return not self._pending and not self._busy

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                while not self._pending and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                push, _ = self._pending.popitem(last=False)
                self._busy = True
            self._send(push)

    def _send(self, push: Push) -> None:
        kind, inode, _ = push
        try:
            self._notify(push)
        except OSError as error:
            if error.errno not in _NOBODY_THERE:
                log.warning("the kernel refused an invalidation", kind=kind, inode=inode, error=str(error))
        else:
            self._counters[kind].inc()
