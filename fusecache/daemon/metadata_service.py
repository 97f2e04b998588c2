"""The agent's half of the metadata that it shares with workers: a socket on which they ask for what they can't see.

A worker reads the store itself and comes here with the rest: folders that are not listed or no longer fresh, and what
the tree has in memory only. The answer has the entry, how long the kernel may keep it, and, of what is in no store, the
folders above it (`agent_messages`). Errors travel by name. On the way back a worker is asked for its metrics and told
its log level; what it counted stays counted when it dies.

    async with trio.open_nursery() as nursery:
        await nursery.start(tree.run)
        await nursery.start(MetadataService(path, tree, store, ...).run)

Who may connect: root and our own user, in a folder of ours. Even so everything is checked and bounded; a worker that
sends what can't be is cut off, and the others do not notice. A worker that is gone leaves its reader slot in the store:
it is freed here.

It answers from the tree and decides nothing about freshness.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import structlog
import trio

from fusecache.cache.record import Entry
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.daemon import agent_messages as messages
from fusecache.daemon.accepting import accepted
from fusecache.daemon.agent_messages import Frames
from fusecache.daemon.control_client import CREDENTIALS
from fusecache.errors import FusecacheError, NotFound, ProtocolError, StateError, Unavailable
from fusecache.kernel.control_listener import short_address
from fusecache.metrics import Metrics
from fusecache.private_folder import prepare_private_folder

log = structlog.get_logger(__name__)

MAX_CONNECTIONS: Final = 128
MAX_QUESTIONS: Final = 512
"""Of one worker at a time; it is not read from while it has so many."""

SEND_S: Final = 30.0
"""A worker that does not take an answer for so long is cut off (it asks again over a new connection)."""

HELLO_S: Final = 10.0
"""For the first message."""

DYING_S: Final = 1.0
"""After a connection ended its process is surely gone, if it was killed."""

MAX_REMEMBERED: Final = 64
"""Workers, living or dead, whose last metrics are kept apart; those of older ones are summed up."""

ASK_WORKER_S: Final = 1.0
"""For metrics and log levels; of a worker that is too busy the last metrics it told count."""

Answering = Callable[[], Awaitable[dict[str, Any]]]
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Gets the whole question; a FusecacheError that it raises becomes the answer."""


class WorkerLine(NamedTuple):
    """What `status` shows of a connected worker."""

    number: int
    pid: int
    connected_s: float
    questions: int
    """Asked since it connected."""


class _Worker:
    """One connection."""

    def __init__(self, stream: trio.SocketStream, *, index: int, pid: int, token: str) -> None:
        self.index = index
        self.pid = pid
        self.token = token
        self.connected_at = trio.current_time()
        self.questions = 0
        self.room = trio.Semaphore(MAX_QUESTIONS)
        self._stream = stream
        self._sending = trio.StrictFIFOLock()
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[trio.Event, list[dict[str, Any]]]] = {}

    async def send(self, message: dict[str, Any]) -> None:
        """Raises BrokenResourceError when it is gone, or does not read."""
        frame = messages.frame(message)
        if len(frame) > messages.MAX_FROM_AGENT:
            frame = messages.frame(
                {"id": message["id"], **messages.packed_error(ProtocolError("the answer is too long"))}
            )
        with trio.move_on_after(SEND_S) as patience:
            async with self._sending:
                await self._stream.send_all(frame)
        if patience.cancelled_caught:
            await trio.aclose_forcefully(self._stream)

    async def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The worker's answer; None when there was none in time."""
        number, answered, box = next(self._ids), trio.Event(), []  # type: int, trio.Event, list[dict[str, Any]]
        self._asked[number] = answered, box
        try:
            with trio.move_on_after(ASK_WORKER_S):
                await self.send({**question, "id": number})
                await answered.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("a worker went away before it answered", index=self.index)
        finally:
            del self._asked[number]
        return box[0] if box else None

    def answered(self, number: int, message: dict[str, Any]) -> None:
        """An answer came in; one that nobody waits for is dropped."""
        if number in self._asked:
            event, box = self._asked[number]
            box.append(message)
            event.set()


class MetadataService:
    """See the module. Event loop only."""

    def __init__(
        self,
        socket_path: Path,
        tree: MetadataTree,
        store: MetadataStore,
        *,
        metrics: Metrics,
        metadata_budget_s: float,
        on_stale_read: Callable[[int], Awaitable[None]],
        list_again: Callable[[int], None],
        extra: Mapping[str, Handler] | None = None,
    ) -> None:
        """`extra`: further kinds of questions and what answers them (`RemoteTree.ask`); they check what they are given.
        `on_stale_read`: a worker met a dead inode; it answers its reader when this returns. `list_again`: list the
        folder of an inode in the background. No question is worked on for longer than `metadata_budget_s`."""
        self._socket_path = socket_path
        self._tree = tree
        self._store = store
        self._metrics = metrics
        self._metadata_budget_s = metadata_budget_s
        self._on_stale_read = on_stale_read
        self._list_again = list_again
        self._extra = dict(extra or {})
        self._workers: set[_Worker] = set()
        self._connections = 0
        self._ended = trio.Event()
        self._counted: OrderedDict[str, list[Any]] = OrderedDict()
        """Last metrics by a worker's token, living or dead."""
        self._counted_before = Metrics(show_unused=False)

    # ---- for the agent ----

    def workers(self) -> list[WorkerLine]:
        """The connected workers, by index."""
        now = trio.current_time()
        return sorted(WorkerLine(it.index, it.pid, now - it.connected_at, it.questions) for it in self._workers)

    async def gathered_metrics(self) -> Metrics:
        """What this process and all workers counted, also those that are gone; of gauges the living ones."""
        async with trio.open_nursery() as nursery:
            for worker in self._workers:
                nursery.start_soon(self._ask_metrics, worker)
        gathered = Metrics()
        gathered.add(self._metrics.dump())
        gathered.add(self._counted_before.dump(), gauges=False)
        living = {worker.token for worker in self._workers}
        for token, dump in self._counted.items():
            gathered.add(dump, gauges=token in living)
        return gathered

    async def set_log_level(self, level: str) -> None:
        """For all workers; one that does not answer is said so in the log."""
        for worker in list(self._workers):
            if await worker.ask({"ask": "log_level", "level": level}) is None:
                log.warning("a worker did not take the log level", index=worker.index, level=level)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Listen until cancelled; the socket is there when this has started. StateError when it can't be made."""
        listener = self._listen()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._free_reader_slots)
                task_status.started()
                while True:
                    connection = await accepted(listener, log, "no worker can connect")
                    if self._connections >= MAX_CONNECTIONS or not _allowed(connection):
                        log.warning("a connection for metadata was refused")
                        connection.close()
                        continue
                    self._connections += 1
                    nursery.start_soon(self._serve, trio.SocketStream(connection))
        finally:
            listener.close()
        raise AssertionError("unreachable: the loop ends by an exception only")

    def _listen(self) -> trio.socket.SocketType:
        path = self._socket_path
        prepare_private_folder(path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()  # of the agent before, which may have been killed
            with short_address(path) as address:
                listener.bind(address)
            path.chmod(0o600)
            listener.listen(MAX_CONNECTIONS)
        except OSError as exc:
            listener.close()
            raise StateError(f"the socket {path} for metadata can't be made: {exc.strerror}") from exc
        return trio.socket.from_stdlib_socket(listener)

    async def _free_reader_slots(self) -> NoReturn:
        """Of workers that were killed: a slot in the middle of a read would keep LMDB from using its pages again."""
        while True:
            await self._ended.wait()
            self._ended = trio.Event()
            # Twice: a process that is being killed may close the socket before the lock that says it lives.
            for wait_s in (0.0, DYING_S):
                await trio.sleep(wait_s)
                freed = self._store.reader_check()
                if freed:
                    log.info("reader slots of ended workers were freed", slots=freed)

    # ---- one connection ----

    async def _serve(self, stream: trio.SocketStream) -> None:
        worker: _Worker | None = None
        try:
            async with stream:
                frames = Frames(stream, messages.MAX_FROM_WORKER)
                with trio.move_on_after(HELLO_S):
                    worker = await self._welcome(stream, frames)
                if worker is not None:
                    await self._converse(worker, frames)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("a worker's connection was lost", index=worker.index if worker else None)
        except* ProtocolError as group:
            log.warning(
                "a worker was not understood; its connection is closed",
                index=worker.index if worker else None,
                error=str(group.exceptions[0]),
            )
        finally:
            self._connections -= 1
            if worker is not None:
                self._workers.discard(worker)
                log.debug("a worker's connection ended", index=worker.index)
                self._ended.set()

    async def _welcome(self, stream: trio.SocketStream, frames: Frames) -> _Worker | None:
        hello = await frames.next()
        if hello is None:
            return None
        if hello.get("tell") != "hello":
            raise ProtocolError("the first message is no hello")
        return _Worker(
            stream,
            index=messages.number(hello, "index"),
            pid=messages.number(hello, "pid"),
            token=messages.text(hello, "token"),
        )

    async def _converse(self, worker: _Worker, frames: Frames) -> None:
        self._workers.add(worker)
        async with trio.open_nursery() as nursery:
            while (message := await frames.next()) is not None:
                if "tell" in message:
                    await self._told(worker, message)
                    continue
                number = messages.number(message, "id")
                del message["id"]
                if "ask" in message:
                    answering = self._answering(message)
                    worker.questions += 1
                    await worker.room.acquire()
                    nursery.start_soon(self._answer, worker, number, answering)
                else:
                    worker.answered(number, message)
            nursery.cancel_scope.cancel()

    async def _answer(self, worker: _Worker, number: int, answering: Answering) -> None:
        try:
            await worker.send({**await self._outcome(answering), "id": number})
        finally:
            worker.room.release()

    async def _outcome(self, answering: Answering) -> dict[str, Any]:
        try:
            with trio.move_on_after(self._metadata_budget_s):
                return await answering()
            raise Unavailable(f"no answer within {self._metadata_budget_s:g} s")
        except FusecacheError as error:
            return messages.packed_error(error)
        except Exception:
            # A mistake of ours in one answer must not end the service for all workers.
            log.exception("a question about metadata could not be answered")
            return messages.packed_error(FusecacheError("the metadata agent failed; see its log"))

    async def _told(self, worker: _Worker, message: dict[str, Any]) -> None:
        kind = message["tell"]
        if kind == "used":
            for number, inode in enumerate(messages.numbers(message, "folders", messages.MAX_USED)):
                self._tree.use(inode)
                if number % 256 == 255:
                    await trio.lowlevel.checkpoint()
        elif kind == "metrics":
            self._count(worker, message)
        elif kind == "list_again":
            self._list_again(messages.number(message, "inode"))
        else:
            raise ProtocolError(f"{str(kind)[:40]!r} is nothing that can be told")

    # ---- questions ----

    def _answering(self, message: dict[str, Any]) -> Answering:
        """What answers a question. Raises ProtocolError when there is no such question."""
        kind = message["ask"]
        whole = message.get("whole") is True
        if kind == "lookup":
            parent, name = messages.number(message, "parent"), messages.name(message, "name")
            return lambda: self._lookup(parent, name, whole)
        if kind in ("getattr", "heal_stale"):
            inode = messages.number(message, "inode")
            return (lambda: self._getattr(inode, whole)) if kind == "getattr" else (lambda: self._heal_stale(inode))
        if kind == "children":
            inode, after = messages.number(message, "inode"), messages.number(message, "after")
            limit = min(messages.number(message, "limit"), messages.MAX_PAGE_ENTRIES)
            return lambda: self._children(inode, after, limit, whole)
        handler = self._extra.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise ProtocolError(f"{str(kind)[:40]!r} is no question")
        return lambda: handler(message)

    async def _lookup(self, parent: int, name: bytes, whole: bool) -> dict[str, Any]:
        try:
            entry = self._tree.hot_child(parent, name) or await self._tree.lookup(parent, name)
        except NotFound as error:
            kernel_until = self._tree.now() + self._tree.negative_timeout_s(parent)
            return {**messages.packed_error(error), "kernel_until": kernel_until}
        return self._packed((entry,), whole)

    async def _getattr(self, inode: int, whole: bool) -> dict[str, Any]:
        return self._packed((self._tree.hot(inode) or await self._tree.getattr(inode),), whole)

    async def _children(self, inode: int, after: int, limit: int, whole: bool) -> dict[str, Any]:
        return self._packed(await self._tree.children(inode, after, limit), whole)

    async def _heal_stale(self, inode: int) -> dict[str, Any]:
        await self._on_stale_read(inode)
        return {}

    def _packed(self, entries: Sequence[Entry], whole: bool) -> dict[str, Any]:
        """Entries with what the kernel may do with them, as many as fit; and what leads to them in no store."""
        packed: list[dict[str, Any]] = []
        size_bytes = 0
        # A moment, not a duration: the clock is the machine's, and what the answer's way takes counts.
        now = self._tree.now()
        for entry in entries:
            packed.append(messages.packed_entry(entry, kernel_until=now + self._tree.kernel_timeout_s(entry)))
            size_bytes += len(packed[-1]["record"])
            if size_bytes > messages.PAGE_BYTES:
                break
        line = self._tree.lineage(entries[: len(packed)], whole=whole)
        return {
            "entries": packed,
            "line": [messages.packed_entry(entry, asked_at=asked_at) for entry, asked_at in line],
        }

    # ---- what workers count ----

    async def _ask_metrics(self, worker: _Worker) -> None:
        answer = await worker.ask({"ask": "metrics"})
        if answer is not None:
            try:
                self._count(worker, answer)
            except ProtocolError as error:
                log.warning("a worker's metrics are no metrics", index=worker.index, error=str(error))

    def _count(self, worker: _Worker, message: dict[str, Any]) -> None:
        dump = message.get("dump")
        try:
            Metrics(show_unused=False).add(dump)
        except ValueError as exc:
            raise ProtocolError(str(exc)) from exc
        assert isinstance(dump, list)
        self._counted[worker.token] = dump
        self._counted.move_to_end(worker.token)
        if len(self._counted) > MAX_REMEMBERED:
            living = {it.token for it in self._workers}
            gone = next((token for token in self._counted if token not in living), None)
            if gone is not None:
                self._counted_before.add(self._counted.pop(gone), gauges=False)


def _allowed(connection: trio.socket.SocketType) -> bool:
    """Whether the process at the other end is root's or our own user's, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    assert isinstance(raw, bytes)  # a buffer length was given
    return CREDENTIALS.unpack(raw)[1] in (0, os.geteuid())
