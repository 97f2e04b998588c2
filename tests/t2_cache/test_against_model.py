"""Another client changes the tree at random; what a mount shows is true as of its freshness promise, always.

The kernel is simulated: it keeps names and attributes exactly as long as it is told, forgets what is pushed, and
walks down again on StaleId. After every operation it looks some path up and lists some folder. The answer must
be what the folder (or what lay at its path) held at some moment of the last `refresh_s`, a listing as a whole:
never two versions mixed. Right after a refresh it must be what is there now.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import trio
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.listing_diff import Change
from fusecache.cache.record import Entry
from fusecache.cache.tree import ROOT
from fusecache.errors import NotFound, StaleId, Unavailable
from tests.t2_cache.alluxio_model import AlluxioModel, Node
from tests.t2_cache.harness import Mounted, mounted

REFRESH_S = 100.0
STALE_S = 150.0
SETTLE_S = 3.0
"""How long after an outage old answers may still come: one question a second finds out that it is over."""

NAMES = (b"a", b"b", b"c")


class Seen(NamedTuple):
    """What an application sees of a name."""

    inode: int
    folder: bool
    mode: int
    length: int


Children = dict[bytes, Seen]


class Moment(NamedTuple):
    """The whole tree from `since` on: children by path and by inode."""

    since: float
    by_path: dict[bytes, Children]
    by_inode: dict[int, Children]


class Kernel:
    """Dentries and their timeouts, and the history to judge answers by."""

    def __init__(self, use: Mounted, clock: MockClock) -> None:
        self.use = use
        self.clock = clock
        self.dentries: dict[tuple[int, bytes], tuple[Seen | None, float]] = {}
        self.history: list[Moment] = []
        self.outage = False
        self.outage_ended = -1e9

    def now(self) -> float:
        return self.clock.current_time()

    def forget(self, change: Change) -> None:
        """A pushed change (called in the pushing thread)."""
        if change.kind in ("added", "removed", "replaced"):
            self.dentries.pop((change.parent, change.name), None)
        elif change.kind == "attributes":
            for key, (seen, _) in list(self.dentries.items()):
                if seen is not None and seen.inode == change.inode:
                    self.dentries.pop(key, None)

    def record(self) -> None:
        """Note what the tree looks like from now on."""
        by_path: dict[bytes, Children] = {}
        by_inode: dict[int, Children] = {}

        def visit(path: bytes, node: Node, inode: int) -> None:
            children = {
                name: Seen(child.file_id + 1, child.folder, child.mode, child.length)
                for name, child in node.children.items()
            }
            by_path[path] = by_inode[inode] = children
            for name, child in node.children.items():
                if child.folder:
                    visit(path + b"/" + name, child, child.file_id + 1)

        visit(b"", self.use.model.root, ROOT)
        self.history.append(Moment(self.now(), by_path, by_inode))

    def window_s(self) -> float:
        lasting = self.outage or self.now() - self.outage_ended < SETTLE_S
        return REFRESH_S + STALE_S if lasting else REFRESH_S

    def allowed(self, path: bytes, inode: int) -> list[Children]:
        """What the folder may be shown to hold."""
        paths = {path}
        with suppress(StaleId):
            paths.add(self.use.tree.path(inode).rstrip(b"/"))
        begin = self.now() - self.window_s()
        states: list[Children] = []
        for number, moment in enumerate(self.history):
            until = self.history[number + 1].since if number + 1 < len(self.history) else float("inf")
            if until >= begin:
                states.extend(moment.by_path[known] for known in paths if known in moment.by_path)
                if inode in moment.by_inode:
                    states.append(moment.by_inode[inode])
        return states

    async def lookup(self, parent: int, name: bytes) -> Seen | None:
        """From the dentry while it holds, else from the tree. Raises StaleId, Unavailable."""
        kept = self.dentries.get((parent, name))
        if kept is not None and kept[1] > self.now():
            return kept[0]
        tree = self.use.tree
        try:
            entry = tree.hot_child(parent, name) or await tree.lookup(parent, name)
        except NotFound:
            self.dentries[parent, name] = (None, self.now() + tree.negative_timeout_s(parent))
            return None
        seen = seen_of(entry)
        self.dentries[parent, name] = (seen, self.now() + tree.kernel_timeout_s(entry))
        return seen

    async def walk(self, path: tuple[bytes, ...]) -> Seen | None:
        """Walk down, judging each step; once more from the root when told StaleId, as the kernel does."""
        for attempt in range(4):
            try:
                seen: Seen | None = Seen(ROOT, True, 0, 0)
                walked = b""
                for name in path:
                    if seen is None or not seen.folder:
                        return None
                    parent, seen = seen.inode, await self.lookup(seen.inode, name)
                    allowed = self.allowed(walked, parent)
                    assert any(state.get(name) == seen for state in allowed), (walked, name, seen, allowed)
                    walked += b"/" + name
                return seen
            except StaleId:
                note(f"stale at attempt {attempt}")
                self.dentries.clear()
        raise AssertionError(f"{path} stays stale")

    async def list_folder(self, path: tuple[bytes, ...]) -> None:
        folder = await self.walk(path)
        if folder is None or not folder.folder:
            return
        listed: Children = {}
        after = 0
        try:
            while page := await self.use.tree.children(folder.inode, after, 2):
                assert [entry.inode for entry in page] == sorted({entry.inode for entry in page})
                assert page[0].inode > after
                after = page[-1].inode
                listed.update((entry.name, seen_of(entry)) for entry in page)
        except StaleId:
            return
        allowed = self.allowed(b"".join(b"/" + name for name in path), folder.inode)
        assert listed in allowed, (path, listed, allowed)


def seen_of(entry: Entry) -> Seen:
    return Seen(entry.inode, entry.folder, entry.mode, entry.length)


PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)
FOLDERS = st.lists(st.sampled_from(NAMES), max_size=2).map(tuple)
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["write", "delete", "mkdir"]), PATHS),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o600, 0o640, 0o700])),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("advance"), st.sampled_from([0.4, 5.0, 30.0, 85.0, 101.0])),
    st.tuples(st.just("refresh"), FOLDERS),
    st.tuples(st.just("outage"), st.booleans()),
)
STEPS = st.lists(st.tuples(OPERATIONS, PATHS, FOLDERS), min_size=1, max_size=25)


def joined(path: tuple[bytes, ...]) -> bytes:
    return b"/" + b"/".join(path)


def change_model(model: AlluxioModel, operation: tuple[object, ...]) -> None:
    """What another client can do; impossible requests do nothing."""
    kind, path = operation[0], operation[1]
    assert isinstance(path, tuple)
    with suppress(NotFound, KeyError):
        if kind == "write":
            parent, name = model.parent(joined(path))
            if parent.folder and not (name in parent.children and parent.children[name].folder):
                model.write(joined(path), len(model.listed) + model._next)
        elif kind == "mkdir":
            parent, name = model.parent(joined(path))
            if parent.folder and name not in parent.children:
                model.mkdir(joined(path))
        elif kind == "delete":
            model.delete(joined(path))
        elif kind == "chmod":
            mode = operation[2]
            assert isinstance(mode, int)
            model.node(joined(path)).mode = mode
        elif kind == "rename":
            target = operation[2]
            assert isinstance(target, tuple)
            parent, name = model.parent(joined(target))
            model.node(joined(path))
            if parent.folder and name not in parent.children and target[: len(path)] != path:
                model.rename(joined(path), joined(target))


async def apply(kernel: Kernel, operation: tuple[object, ...]) -> None:
    kind, argument = operation[0], operation[1]
    if kind == "advance":
        assert isinstance(argument, float)
        kernel.clock.jump(argument)
        await settle(kernel)
    elif kind == "outage":
        if kernel.outage and not argument:
            kernel.outage_ended = kernel.now()
        kernel.outage = bool(argument)
        kernel.use.model.error = Unavailable("no master answers") if argument else None
    elif kind == "refresh":
        assert isinstance(argument, tuple)
        await refresh(kernel, argument)
    else:
        change_model(kernel.use.model, operation)
        kernel.record()


async def settle(kernel: Kernel) -> None:
    """Let background listings end: under a MockClock they take no time."""
    loader = kernel.use.tree._loader
    assert loader is not None
    while True:
        await wait_all_tasks_blocked()
        if not len(loader._listings) and not len(loader._questions):
            return
        await trio.to_thread.run_sync(lambda: None)


async def refresh(kernel: Kernel, path: tuple[bytes, ...]) -> None:
    """After refreshing every folder down a path, the path is shown as it is now."""
    inode = ROOT
    walked = b""
    for name in (*path, None):
        await kernel.use.tree.refresh(inode, force_sync=True)
        now = kernel.history[-1].by_path[walked]
        for known in NAMES:
            assert await kernel.lookup(inode, known) == now.get(known), (walked, known)
        if name is None or name not in now or not now[name].folder:
            return
        inode, walked = now[name].inode, walked + b"/" + name


async def run_steps(
    folder: Path,
    clock: MockClock,
    steps: list[tuple[tuple[object, ...], tuple[bytes, ...], tuple[bytes, ...]]],
    chunk: int,
    background: bool,
) -> None:
    model = AlluxioModel(piece=2)
    kernel: Kernel
    policy = FreshnessPolicy(refresh_s=REFRESH_S, stale_if_error_s=STALE_S, negative_s=20.0, refresh_calls_per_s=1000.0)
    async with mounted(
        folder, model, clock, policy=policy, chunk=chunk, hot_entries=3, on_change=lambda change: kernel.forget(change)
    ) as use:
        kernel = Kernel(use, clock)
        kernel.record()
        for operation, path, listed in steps:
            note(f"{kernel.now():.1f}: {operation}, look up {path}, list {listed}")
            try:
                await apply(kernel, operation)
                await kernel.walk(path)
                await kernel.list_folder(listed)
            except Unavailable:
                assert kernel.outage or kernel.now() - kernel.outage_ended < SETTLE_S
            await settle(kernel)


@settings(max_examples=60)
@given(STEPS, st.sampled_from([1, 2, 8192]), st.booleans())
@example(
    # A folder moves away, is listed in its new place, and comes back.
    steps=[
        (("mkdir", (b"a",)), (b"a",), ()),
        (("mkdir", (b"b",)), (b"b",), (b"b",)),
        (("mkdir", (b"a", b"c")), (b"a", b"c"), (b"a",)),
        (("rename", (b"a", b"c"), (b"b", b"c")), (b"b", b"c"), (b"b",)),
        (("refresh", (b"b",)), (b"b", b"c"), (b"b",)),
        (("rename", (b"b", b"c"), (b"a", b"c")), (b"a", b"c"), (b"a",)),
        (("refresh", (b"a",)), (b"a", b"c"), (b"a",)),
        (("refresh", (b"b",)), (b"a", b"c"), (b"a", b"c")),
    ],
    chunk=8192,
    background=True,
)
@example(
    # Looked at just before it is due, after a change: the kernel may keep the old one until then only.
    steps=[
        (("write", (b"a",)), (b"b",), ()),
        (("write", (b"a",)), (b"b",), (b"b",)),
        (("advance", 30.0), (b"b",), (b"b",)),
        (("advance", 30.0), (b"b",), (b"b",)),
        (("advance", 5.0), (b"a",), (b"a",)),
        (("advance", 30.0), (b"a",), (b"a",)),
        (("advance", 5.0), (b"a",), (b"a",)),
        (("advance", 5.0), (b"a",), (b"a",)),
    ],
    chunk=8192,
    background=False,
)
@example(
    # Nobody answers for longer than old answers may be given.
    steps=[
        (("write", (b"a",)), (b"a",), ()),
        (("outage", True), (b"a",), ()),
        (("write", (b"a",)), (b"a",), ()),
        *[(("advance", 85.0), (b"a",), ())] * 4,
        (("outage", False), (b"a",), ()),
        (("advance", 5.0), (b"a",), ()),
    ],
    chunk=8192,
    background=False,
)
def test_mount_shows_what_was_true_within_its_promise(
    steps: list[tuple[tuple[object, ...], tuple[bytes, ...], tuple[bytes, ...]]], chunk: int, background: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = MockClock()
        trio.run(run_steps, Path(folder) / "m", clock, steps, chunk, background, clock=clock)
