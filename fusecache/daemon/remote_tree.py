"""The metadata tree as a worker sees it: its own eyes on the agent's store, and the agent for the rest.

A kernel request that finds its folder fresh in the store is answered here, as in the process that has the tree
(`cache.shared_known`): nobody is asked, and it does not matter whether the agent lives. Everything else is a question
over one socket (`agent_link`), which waits for an agent that is away, at most `metadata_budget_s`.

What the agent tells is kept only for what a worker says without asking: how long the kernel may keep it, paths, and
whether an id is dead. An agent that was started anew has forgotten what it had in memory only (files of folders that it
had not listed yet): on the way to such a file it is led again, name by name.

Every few seconds the agent is told which folders were used here (it keeps those fresh) and what was counted.

It implements `fs.operations.Tree`; no errno, no Alluxio, no file content.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import structlog
import trio

from fusecache import logs
from fusecache.cache.board import BoardReader
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.known import ROOT
from fusecache.cache.read_only_store import ReadOnlyStore
from fusecache.cache.record import Entry
from fusecache.cache.shared_known import SharedKnown
from fusecache.clock import Clock
from fusecache.daemon import agent_messages as messages
from fusecache.daemon.agent_link import AgentLink
from fusecache.errors import NotFound, ProtocolError, StaleId, Unavailable, UsageError
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

REPORT_S: Final = 5.0
"""Between two reports of folders in use and of metrics."""

HEAL_S: Final = 10.0
"""A reader of a dead id is answered after so long even when the agent has not healed the path yet."""

MAX_TOLD: Final = 16384
"""Answers whose time for the kernel is remembered."""


class _Told(NamedTuple):
    """An answer of the agent, and until when the kernel may keep it."""

    entry: Entry
    until: float


class RemoteTree:
    """See the module. `run` must be running before anything is awaited; event loop only."""

    def __init__(
        self,
        socket_path: Path,
        *,
        board: BoardReader,
        index: int,
        root_path: bytes,
        policy: FreshnessPolicy,
        clock: Clock,
        metrics: Metrics,
        metadata_budget_s: float,
        hot_entries: int = 50_000,
        store: ReadOnlyStore | None = None,
    ) -> None:
        """`socket_path` is the agent's (`MetadataService`); `board` its shared memory; `index` this worker's number.

        No I/O here. `store`: opened as the board says; a process that has the writer's store itself gives its own.
        """
        self._now = clock.now
        self._metrics = metrics
        self._metadata_budget_s = metadata_budget_s
        self._known = known = SharedKnown(
            board,
            ReadOnlyStore() if store is None else store,
            root_path=root_path,
            policy=policy,
            clock=clock,
            metrics=metrics,
            hot_entries=hot_entries,
        )
        self._link = AgentLink(
            socket_path,
            hello={"tell": "hello", "index": index, "pid": os.getpid(), "token": secrets.token_hex(16)},
            on_question=self._answer,
        )
        self._told: OrderedDict[int, _Told] = OrderedDict()
        self._missing: OrderedDict[int, float] = OrderedDict()
        """Folder -> until when the kernel may keep that a name is missing, as the agent said last."""

        # Bound once, not wrapped: these run for every kernel request.
        self.hot = known.hot
        self.hot_child = known.hot_child
        self.path = known.path
        self.ufs_path = known.ufs_path
        self.superseded = known.superseded
        self.listing_of = known.listing_of

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Keep the connection and report, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._link.run)
            nursery.start_soon(self._report)
            task_status.started()
        raise AssertionError("unreachable: the nursery ends by cancellation only")

    async def start(self) -> None:
        """Wait until the mounted folder is known. Raises Unavailable after `metadata_budget_s`."""
        await self.getattr(ROOT)

    def close(self) -> None:
        """Unmap the store. Idempotent."""
        self._known.close()

    @property
    def root(self) -> Entry:
        """The mounted folder's entry; after `start` only."""
        assert self._known.root is not None, "start() comes first"
        return self._known.root

    # ---- requests ----

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry called `name`. Raises NotFound, StaleId (the folder is dead), Unavailable and the like."""
        entry = self.hot_child(parent, name)
        if entry is not None:
            return entry
        if self._known.lacks(parent, name):
            self._missing.pop(parent, None)
            raise NotFound(f"no {name!r} in inode {parent}")
        try:
            return await self._lookup(parent, name)
        except StaleId:
            if not await self._lead_to(parent):
                raise
            return await self._lookup(parent, name)

    async def getattr(self, inode: int) -> Entry:
        """The entry of an inode. Raises StaleId when it is dead or unknown, Unavailable and the like."""
        entry = self.hot(inode)
        if entry is not None:
            return entry
        try:
            return await self._getattr(inode)
        except StaleId:
            if not await self._lead_to(inode):
                raise
            return await self._getattr(inode)

    async def children(self, inode: int, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries with inode > `after`, ordered by inode; none = the end. The first page (after = 0) is
        of a fresh listing, later ones go on with the one there is. Raises StaleId, Unavailable and the like."""
        page = self._known.whole_page(inode, after, limit)
        if page is not None:
            return page
        try:
            return await self._children(inode, after, limit)
        except StaleId:
            if not await self._lead_to(inode):
                raise
            return await self._children(inode, after, limit)

    def kernel_timeout_s(self, entry: Entry) -> float:
        """How long the kernel may keep `entry`, in seconds."""
        told = self._told.get(entry.inode)
        if told is None or told.entry != entry:
            return self._known.kernel_timeout_s(entry)
        # The store says it better, if a listing has the entry by now.
        listed_s = 0.0 if self._known.marked(entry.inode) else self._known.kernel_timeout_s(entry)
        return listed_s or max(0.0, told.until - self._now())

    def negative_timeout_s(self, parent: int) -> float:
        """How long the kernel may keep that a name is missing in folder `parent`, in seconds."""
        until = self._missing.get(parent)
        return self._known.negative_timeout_s(parent) if until is None else max(0.0, until - self._now())

    def is_immutable(self, folder: int) -> bool:
        """Whether what is listed in a folder is declared never to change."""
        return self._known.is_immutable(folder)

    def is_current(self, inode: int) -> bool:
        """Whether a listing has this inode now; False also when only the agent knows."""
        return not self._known.marked(inode) and self._known.find(inode) is not None

    # ---- what the agent does for us ----

    async def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """A question that `MetadataService` was given a handler for. Raises what that raised, and Unavailable."""
        answer = await self._link.ask({**fields, "ask": kind}, self._metadata_budget_s)
        if "error" in answer:
            raise messages.told_error(answer)
        return answer

    async def heal_stale(self, inode: int) -> None:
        """A READ met a dead id: have the kernel's pages of it dropped and its folder listed again. Never raises; an
        agent that is away has nothing to heal with."""
        if not self._link.connected:
            return
        try:
            await self._link.ask({"ask": "heal_stale", "inode": inode}, HEAL_S)
        except Unavailable as error:
            log.debug("not healed", inode=inode, error=str(error))

    def list_again(self, inode: int) -> None:
        """Have the folder of `inode` listed in the background."""
        self._link.tell({"tell": "list_again", "inode": inode})

    # ---- questions ----

    async def _lookup(self, parent: int, name: bytes) -> Entry:
        question = {"ask": "lookup", "parent": parent, "name": messages.packed_bytes(name)}
        answer = await self._asked(question)
        if answer.get("error") == NotFound.__name__:
            self._missing[parent] = messages.seconds(answer, "kernel_until")
            self._missing.move_to_end(parent)
            if len(self._missing) > MAX_TOLD:
                self._missing.popitem(last=False)
        (entry,) = self._entries(answer, most=1)
        if (entry.parent, entry.name) != (parent, name):
            raise ProtocolError(f"the agent answered {name!r} in inode {parent} with another entry")
        return entry

    async def _getattr(self, inode: int) -> Entry:
        (entry,) = self._entries(await self._asked({"ask": "getattr", "inode": inode}), most=1)
        if entry.inode != inode:
            raise ProtocolError(f"the agent answered inode {inode} with inode {entry.inode}")
        return entry

    async def _children(self, inode: int, after: int, limit: int) -> list[Entry]:
        question = {"ask": "children", "inode": inode, "after": after, "limit": limit}
        page = self._entries(await self._asked(question), most=limit)
        last = after
        for entry in page:
            if entry.parent != inode or entry.inode <= last:
                raise ProtocolError(f"the agent answered with a page of inode {inode} that is in no order")
            last = entry.inode
        return page

    async def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._known.alone:
            question = {**question, "whole": True}
        return await self._link.ask(question, self._metadata_budget_s)

    def _entries(self, answer: dict[str, Any], *, most: int) -> list[Entry]:
        """The entries of an answer; what is to be remembered of them is. Raises the error that was answered instead."""
        if "error" in answer:
            raise messages.told_error(answer)
        found = messages.told_entries(answer, "entries", "kernel_until")
        if len(found) > most or (most == 1 and not found):
            raise ProtocolError(f"the agent answered with {len(found)} entries")
        for entry, asked_at in messages.told_entries(answer, "line", "asked_at"):
            self._known.learn(entry, asked_at)
        for entry, kernel_until in found:
            self._told[entry.inode] = _Told(entry, kernel_until)
            self._told.move_to_end(entry.inode)
        while len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return [entry for entry, _ in found]

    async def _lead_to(self, inode: int) -> bool:
        """Lead the agent down to an inode that it does not know (any more) but that was told here; True when it is
        still there."""
        way = self._known.way_to(inode)
        for step in way:
            try:
                found = await self._lookup(step.parent, step.name)
            except (NotFound, StaleId):
                return False
            if found.inode != step.inode:
                return False
        return bool(way)

    # ---- reports ----

    async def _report(self) -> NoReturn:
        since = -math.inf
        while True:
            now = self._now()
            used = self._known.used_since(since)
            since = now
            for start in range(0, len(used), messages.MAX_USED):
                self._link.tell({"tell": "used", "folders": used[start : start + messages.MAX_USED]})
            self._known.count_entries()
            self._link.tell({"tell": "metrics", "dump": self._metrics.dump()})
            await trio.sleep(REPORT_S)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Of the agent."""
        kind = question["ask"]
        if kind == "metrics":
            return {"dump": self._metrics.dump()}
        if kind == "log_level":
            level = next((level for level in logs.LEVELS if level == question.get("level")), None)
            if level is None:
                raise UsageError(f"log level {str(question.get('level'))[:40]!r}: allowed are {', '.join(logs.LEVELS)}")
            logs.set_level(level)
            return {"level": logs.level()}
        raise UsageError(f"{str(kind)[:40]!r} is no question for a worker")
