"""A worker's connection to the agent: questions that outlive it.

`ask` puts a question on the list and waits for its answer; `run` keeps a connection and works the list off. When the
connection ends (the agent was killed, or restarted) every question without an answer is asked again over the next one:
all of them only read, or are harmless twice. So the absence of the agent delays a request and never fails it, until the
request's own budget is over.

What the agent asks (metrics, log level) is answered by `on_question`.

It knows no entries: `remote_tree` does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import trio

from fusecache.daemon import agent_messages as messages
from fusecache.daemon.agent_messages import Frames
from fusecache.errors import FusecacheError, ProtocolError, Unavailable
from fusecache.kernel.control_listener import short_address

log = structlog.get_logger(__name__)

FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.25
"""Between two attempts to connect: an agent that was restarted is found within a quarter of a second."""

MAX_TOLD: Final = 64
"""Messages without an answer that wait for a connection; the oldest are dropped."""


class _Question:
    __slots__ = ("answer", "answered", "frame")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.answered = trio.Event()
        self.answer: dict[str, Any] = {}


class AgentLink:
    """See the module. Event loop only."""

    def __init__(
        self,
        socket_path: Path,
        *,
        hello: dict[str, Any],
        on_question: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        """`hello` is told first on every connection; `on_question` answers the agent and may raise FusecacheError."""
        self._socket_path = socket_path
        self._hello = hello
        self._on_question = on_question
        self._ids = itertools.count(1)
        self._open: dict[int, _Question] = {}
        """Without an answer, oldest first."""
        self._unsent: deque[bytes] = deque()
        self._told: deque[bytes] = deque(maxlen=MAX_TOLD)
        self._wake = trio.Event()
        self.connected = False
        self._heard = False
        """Whether the agent said anything over this connection."""

    async def ask(self, question: dict[str, Any], budget_s: float) -> dict[str, Any]:
        """The agent's answer, which may be an error. Raises Unavailable after `budget_s`."""
        number = next(self._ids)
        asked = self._open[number] = _Question(messages.frame({**question, "id": number}))
        if self.connected:
            self._unsent.append(asked.frame)
            self._wake.set()
        try:
            with trio.move_on_after(budget_s):
                await asked.answered.wait()
        finally:
            del self._open[number]
        if not asked.answered.is_set():
            raise Unavailable(f"the metadata agent gave no answer within {budget_s:g} s")
        return asked.answer

    def tell(self, message: dict[str, Any]) -> None:
        """Send without waiting for anything; kept for the next connection while there is none."""
        self._told.append(messages.frame(message))
        self._wake.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Keep a connection until cancelled."""
        task_status.started()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                stream = await self._connect()
            except OSError as exc:
                log.debug("no metadata agent", error=str(exc))
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._heard = False
            try:
                async with stream:
                    await self._converse(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
                log.debug("the connection to the metadata agent was lost", error=str(group.exceptions[0]))
            except* ProtocolError as group:
                log.warning("the metadata agent was not understood", error=str(group.exceptions[0]))
            finally:
                self.connected = False
            # An agent that lets nobody in (too many connections) is not asked two hundred times a second.
            pause_s = FIRST_PAUSE_S if self._heard else min(2 * pause_s, LONGEST_PAUSE_S)
            await trio.sleep(pause_s)

    async def _connect(self) -> trio.SocketStream:
        connection = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        try:
            with short_address(self._socket_path) as address:
                await connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return trio.SocketStream(connection)

    async def _converse(self, stream: trio.SocketStream) -> None:
        await stream.send_all(messages.frame(self._hello))
        self._unsent.clear()
        self._unsent.extend(question.frame for question in self._open.values())
        self.connected = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            await self._receive(stream)
            nursery.cancel_scope.cancel()

    async def _send(self, stream: trio.SocketStream) -> NoReturn:
        while True:
            while self._unsent or self._told:
                queue = self._told or self._unsent  # metrics that were told must not overtake those asked for later
                await stream.send_all(queue.popleft())
            self._wake = trio.Event()
            await self._wake.wait()

    async def _receive(self, stream: trio.SocketStream) -> None:
        frames = Frames(stream, messages.MAX_FROM_AGENT)
        while (message := await frames.next()) is not None:
            self._heard = True
            number = messages.number(message, "id")
            del message["id"]
            if "ask" in message:
                self._unsent.append(messages.frame({**self._answer(message), "id": number}))
                self._wake.set()
                continue
            question = self._open.get(number)
            if question is not None:  # else: nobody waits for it any more
                question.answer = message
                question.answered.set()

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._on_question(message)
        except FusecacheError as error:
            return messages.packed_error(error)
