"""The agent's line to the supervisor: one JSON object a message, over an inherited SEQPACKET socket.

    agent -> supervisor   prepared (the open mode, and why), ready (reads work), failed (exit code, text), status, stop
    supervisor -> agent   serving (mode, device, features, tuning), status (the parts), stop

`hear` gives what came in order; `status` is a question whose answer passes by the others. The end of the line is the
supervisor's end.

Starts nothing and decides nothing.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import trio

from fusecache.errors import ProtocolError

MOST_BYTES = 1 << 18
"""One message; the largest is the table of parts."""

STATUS_S = 2.0
"""How long the supervisor may take for its table: it does nothing that waits."""


class SupervisorLink:
    """See the module. Event loop only, but for `say_now`."""

    def __init__(self, descriptor: int) -> None:
        self._plain = socket.socket(fileno=descriptor)
        self._status: list[trio.Event] = []
        self._table: dict[str, Any] = {}

    def say_now(self, message: dict[str, Any]) -> None:
        """Send without an event loop; BrokenPipeError when the supervisor is gone."""
        self._plain.send(json.dumps(message).encode())

    async def status(self) -> dict[str, Any]:
        """The supervisor's table of parts; empty when it does not answer in time. `listen` must run."""
        answered = trio.Event()
        self._status.append(answered)
        try:
            self.say_now({"kind": "status"})
            with trio.move_on_after(STATUS_S):
                await answered.wait()
                return self._table
        except OSError:
            pass
        finally:
            if answered in self._status:
                self._status.remove(answered)
        return {}

    async def listen(self, messages: trio.MemorySendChannel[dict[str, Any]]) -> None:
        """Pass on what the supervisor says until it is gone. Raises ProtocolError for what is no message."""
        self._plain.setblocking(False)
        line = trio.socket.from_stdlib_socket(self._plain)
        async with messages:
            while data := await line.recv(MOST_BYTES):
                message = _message(data)
                if message["kind"] == "status":
                    self._table = message
                    for answered in self._status:
                        answered.set()
                else:
                    await messages.send(message)


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError as exc:
        raise ProtocolError("the supervisor's message is no JSON") from exc
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("the supervisor's message has no kind")
    return message
