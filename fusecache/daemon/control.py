"""The control socket of a mount: who may ask the daemon what, while it runs.

A unix stream socket `control.sock` (0666) in a folder of its own (0755), so that it can be mounted into a pod beside
the data (`kernel.control_listener`). One JSON object a line each way (see `daemon.control_client`). Everybody on the
node may connect; the kernel says who it is (SO_PEERCRED), and each message kind says who may send it: reading kinds
everybody, changing kinds root and the daemon's own user. Requests, connections and their time are bounded, because
everybody includes programs that mean no good.

    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(listener, handlers).run)

The handlers are given by whoever wires the daemon; nothing here knows what they do.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import structlog
import trio

from fusecache.daemon.accepting import accepted
from fusecache.daemon.control_client import CREDENTIALS, call, socket_path
from fusecache.errors import FusecacheError, MountError, UsageError

__all__ = ["ControlServer", "Handler", "call", "socket_path"]

log = structlog.get_logger(__name__)

MAX_REQUEST = 64 << 10
"""Bytes of one request line."""

MAX_CONNECTIONS = 32
"""Connections at a time; more are closed at once."""

MAX_CONNECTIONS_PER_USER = 8
"""Of one user, so that one can't keep the others out. Root and the daemon's own user are exempt."""

REQUEST_S = 10.0
"""Seconds for a request to arrive, and for its answer to be taken."""

HANDLER_S = 300.0
"""Seconds a handler may work; a refresh lists folders."""

CONNECTION_S = 900.0
"""Seconds a connection may live, whatever it does."""


class Handler(NamedTuple):
    """One message kind."""

    name: str
    fn: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    """Gets the request without `kind`; a FusecacheError it raises becomes the answer. Twice must be as once: who got no
    answer asks again (`control_client.ask`)."""

    privileged: bool
    """True = root and the daemon's own user only."""


class ControlServer:
    """Serves the handlers on one listening socket, which it takes over."""

    def __init__(self, listener: socket.socket, handlers: Mapping[str, Handler]) -> None:
        listener.setblocking(False)
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._handlers = handlers
        self._trusted = {0, os.geteuid()}
        self._connections: dict[int, int] = {}
        """User -> open connections."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Answer until cancelled."""
        with self._listener:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    connection = await accepted(self._listener, log, "control_accept_failed")
                    uid = _peer_uid(connection)
                    if self._admit(uid):
                        nursery.start_soon(self._serve, connection, uid)
                    else:
                        log.warning("control_connection_refused", uid=uid, reason="too many")
                        connection.close()
        raise AssertionError("unreachable: the loop ends by an exception only")

    def _admit(self, uid: int) -> bool:
        own = self._connections.get(uid, 0)
        if uid not in self._trusted and (
            own >= MAX_CONNECTIONS_PER_USER or sum(self._connections.values()) >= MAX_CONNECTIONS
        ):
            return False
        self._connections[uid] = own + 1
        return True

    async def _serve(self, connection: trio.socket.SocketType, uid: int) -> None:
        stream = trio.SocketStream(connection)
        try:
            async with stream:
                with trio.move_on_after(CONNECTION_S):
                    await self._converse(stream, uid)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("control_connection_lost", uid=uid)
        finally:
            self._connections[uid] -= 1
            if not self._connections[uid]:
                del self._connections[uid]

    async def _converse(self, stream: trio.SocketStream, uid: int) -> None:
        """Requests of one connection, one after the other."""
        buffer = bytearray()
        while True:
            with trio.move_on_after(REQUEST_S) as patience:
                while b"\n" not in buffer:
                    if len(buffer) > MAX_REQUEST:
                        break
                    piece = await stream.receive_some(MAX_REQUEST)
                    if not piece:
                        return
                    buffer += piece
            if patience.cancelled_caught:
                return
            line, _, rest = bytes(buffer).partition(b"\n")
            too_long = len(line) > MAX_REQUEST
            reply = (
                _failure(UsageError(f"the request is longer than {MAX_REQUEST} bytes"))
                if too_long
                else await self._answer(line, uid)
            )
            with trio.move_on_after(REQUEST_S) as patience:
                await stream.send_all(json.dumps(reply).encode() + b"\n")
            if too_long or patience.cancelled_caught:
                return
            buffer = bytearray(rest)

    async def _answer(self, line: bytes, uid: int) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return _failure(UsageError("the request is not JSON"))
        kind = request.pop("kind", None) if isinstance(request, dict) else None
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            return _failure(UsageError(f"the request's kind {str(kind)[:64]!r} is not known; known: {known}"))
        if handler.privileged and uid not in self._trusted:
            log.warning("control_request_refused", kind=handler.name, uid=uid)
            return _failure(MountError(f"{handler.name} is for root and the user who mounted, not for uid {uid}"))
        try:
            with trio.fail_after(HANDLER_S):
                return {"ok": True, **await handler.fn(request)}
        except FusecacheError as failure:
            return _failure(failure)
        except trio.TooSlowError:
            return _failure(FusecacheError(f"{handler.name} took longer than {HANDLER_S:g} s"))
        except Exception:
            log.exception("control_handler_failed", kind=handler.name)
            return _failure(FusecacheError(f"{handler.name} failed unexpectedly; see the daemon's log"))


def _failure(failure: FusecacheError) -> dict[str, Any]:
    return {"ok": False, "type": type(failure).__name__.lstrip("_"), "error": str(failure)}


def _peer_uid(connection: trio.socket.SocketType) -> int:
    """The user at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    assert isinstance(raw, bytes)  # a buffer length was given
    _, uid, _ = CREDENTIALS.unpack(raw)
    return int(uid)
