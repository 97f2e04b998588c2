"""The agent's line to the supervisor: one JSON object a message, over an inherited SEQPACKET socket.

    agent -> supervisor   prepared (the open mode, and why), look, ready (reads work), failed (exit code, text), status,
                          pong
    supervisor -> agent   serving (mode, device, features, tuning; with the control socket), looked (errno), status (the
                          parts), ping (answered pong: the event loop turns)

`listen` gives what came in order; `status` and `look` are questions whose answers pass by the others. The end of the
line is the supervisor's end.

Starts nothing and decides nothing.
"""

from __future__ import annotations

import array
import contextlib
import json
import socket
from typing import Any

import trio

from fusecache.errors import ProtocolError

MOST_BYTES = 1 << 18
"""One message; the largest is the table of parts."""

STATUS_S = 2.0
"""How long the supervisor may take for its table: it does nothing that waits."""

_DESCRIPTOR_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class SupervisorLink:
    """See the module. Event loop only, but for `say_now`."""

    def __init__(self, descriptor: int) -> None:
        self._plain = socket.socket(fileno=descriptor)
        self._waiting: dict[str, list[trio.Event]] = {"status": [], "looked": []}
        """By the kind of answer."""

        self._answers: dict[str, dict[str, Any]] = {}
        self.control: socket.socket | None = None
        """The control socket, listening; came with `serving`."""

    def say_now(self, message: dict[str, Any]) -> None:
        """Send without an event loop; BrokenPipeError when the supervisor is gone."""
        self._plain.send(json.dumps(message).encode())

    async def status(self) -> dict[str, Any]:
        """The supervisor's table of parts; empty when it does not answer in time. `listen` must run."""
        return await self._ask("status", "status", STATUS_S) or {}

    async def look(self, within_s: float) -> int | None:
        """The supervisor's first look at the mount: its errno, 0 = all went well; None = no word in time."""
        answer = await self._ask("look", "looked", within_s)
        number = answer.get("errno") if answer is not None else None
        return number if type(number) is int else None

    async def listen(self, messages: trio.MemorySendChannel[dict[str, Any]]) -> None:
        """Pass on what the supervisor says until it is gone. Raises ProtocolError for what is no message."""
        self._plain.setblocking(False)
        line = trio.socket.from_stdlib_socket(self._plain)
        async with messages:
            while True:
                data, ancillary, _, _ = await line.recvmsg(MOST_BYTES, _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC)
                self._keep_descriptors(ancillary)
                if not data:
                    return
                message = _message(data)
                kind = message["kind"]
                if kind == "ping":
                    with contextlib.suppress(OSError):  # a supervisor that reads nothing asks nothing more either
                        self.say_now({"kind": "pong"})
                elif kind in self._waiting:
                    self._answers[kind] = message
                    for answered in self._waiting[kind]:
                        answered.set()
                else:
                    await messages.send(message)

    async def _ask(self, kind: str, answer: str, within_s: float) -> dict[str, Any] | None:
        answered = trio.Event()
        waiting = self._waiting[answer]
        waiting.append(answered)
        try:
            self.say_now({"kind": kind})
            with trio.move_on_after(within_s):
                await answered.wait()
                return self._answers[answer]
        except OSError:
            pass
        finally:
            waiting.remove(answered)
        return None

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """The control socket is the only one that is ever sent."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                for descriptor in descriptors:
                    if self.control is not None:
                        self.control.close()
                    self.control = socket.socket(fileno=descriptor)


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError as exc:
        raise ProtocolError("the supervisor's message is no JSON") from exc
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("the supervisor's message has no kind")
    return message
