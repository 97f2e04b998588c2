"""Which block files the kernel, or the gate, may read without asking a worker, and their way to the gate.

A worker that has opened a block file offers its descriptor: that of a one-block file before it answers the OPEN (in
`passthrough` mode), any when it has answered a READ from it. What is read from then on nobody here can
check, so the block's version must be confirmed before (`comparisons`). The request that finds it unconfirmed is an
ordinary one.

Registers nothing: the gate checks what it gets and tells the kernel.
"""

from __future__ import annotations

from fusecache.cache.record import Entry
from fusecache.daemon.comparisons import Comparisons
from fusecache.kernel.offers import OfferSender
from fusecache.prefetch.open_blocks import OpenBlock


class PassthroughOffers:
    """The worker's half of passthrough. Event loop only."""

    def __init__(self, descriptor: int, comparisons: Comparisons) -> None:
        self._sender = OfferSender(descriptor)
        self._comparisons = comparisons

    def offer(self, entry: Entry, index: int, opened: OpenBlock) -> bool:
        """Send the descriptor of block `index` if its version is confirmed. False when it was not sent; never waits."""
        if not self._comparisons.confirm(entry, opened.fd):
            return False
        block_bytes = 0 if entry.block_count == 1 else entry.block_size
        return self._sender.offer(entry.inode, opened.fd, index, block_bytes)

    def close(self) -> None:
        """No more offers."""
        self._sender.close()
