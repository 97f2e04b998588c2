"""One wait of a loop: for signals, for what others have to say, for room in their sockets, and for the next timer."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Iterator, Mapping

from fusecache.kernel.channel import Channel
from fusecache.kernel.signals import Signals

Step = Callable[[], None]


def due(
    signals: Signals,
    sources: Mapping[int, Step],
    channels: Iterable[tuple[Channel | None, Step]] = (),
    timeout_ms: int | None = None,
) -> Iterator[Step]:
    """Wait until there is something to do; then what is to be done, one after the other.

    `sources` are descriptors that are waited on for reading. A channel that is None or closed has nothing to say.
    Signals end the wait, and are the caller's to take.
    """
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    for descriptor in sources:
        poll.register(descriptor, select.POLLIN)
    open_channels: dict[int, tuple[Channel, Step]] = {}
    for channel, hear in channels:
        if channel is not None and not channel.closed:
            open_channels[channel.fileno()] = (channel, hear)
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_waiting else 0))
    for descriptor, events in poll.poll(timeout_ms):
        if descriptor in open_channels:
            channel, hear = open_channels[descriptor]
            if events & select.POLLOUT:
                channel.flush()
            if events & ~select.POLLOUT:
                yield hear
        elif descriptor in sources:
            yield sources[descriptor]
