"""The next connection at a listening socket, on a machine (or in a pod) that may be out of descriptors.

accept(2) fails then, and the connection goes on waiting: to ask again at once would take a processor for nothing. So it
is said, and tried again after a pause, and nobody who comes is turned away.
"""

from __future__ import annotations

from typing import Any

import trio

from fusecache.status_http import ACCEPT_PAUSE_S


async def accepted(listener: trio.socket.SocketType, log: Any, event: str) -> trio.socket.SocketType:
    """Who has come. `event` is what a failure is called in `log`."""
    while True:
        try:
            connection, _ = await listener.accept()
        except OSError as failure:
            log.warning(event, error=failure.strerror)
            await trio.sleep(ACCEPT_PAUSE_S)
        else:
            return connection
