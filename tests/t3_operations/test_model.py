"""A model against the whole stack below the kernel: another client changes the tree, time passes, and every look-up,
listing and read is held against what the tree was within the promised time.

The model is a list of states, each with the time in which it was true. An answer is right when one state of the last
`refresh_s`, and not older than the folder's last refresh, gives it; a read is of one version, whole.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyfuse3 import FUSEError

from fusecache.alluxio.block_stream import BlockStream
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.daemon import file_context
from fusecache.embedded.server import EmbeddedServer
from fusecache.prefetch import fetcher
from tests.support.below_kernel import BelowKernel, MovableClock, below_kernel, cluster_of
from tests.support.embedded import WireClient, embedded_server

REFRESH_S = 600.0
BLOCK_BYTES = 16 << 10
FOLDERS = (b"/", b"/a/", b"/b/")
NAMES = (b"x", b"y", b"z\xff")
FIRST_MTIME_S = 1_600_000_000

_numbers = itertools.count()

Step = tuple[str, int, int, int]
"""(what, folder, name, a size or another place)."""

State = dict[bytes, bytes]
"""Path -> content."""


class Scene(NamedTuple):
    server: EmbeddedServer
    other: WireClient
    source: Path
    state: Path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    base = tmp_path_factory.mktemp("model")
    (base / "source").mkdir()
    with (
        embedded_server(base / "source", base / "server", block_workers=2, block_size=BLOCK_BYTES) as server,
        WireClient(server.master_target) as other,
    ):
        yield Scene(server, other, base / "source", base / "state")


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a replaced file that is open: the daemon asks about it sooner than by itself, and always."""
    expected_logs("block worker failed|local block file failed|request failed", optional=True)
    monkeypatch.setattr(fetcher, "ASK_AFTER_S", 0.1)
    monkeypatch.setattr(file_context, "CONFIRM_AGE_S", 0.0)


class Model:
    """The tree as the other client makes it, with its past."""

    def __init__(self, scene: Scene, name: bytes, clock: MovableClock) -> None:
        self._other = scene.other
        self._name = name
        self._folder = folder = scene.source / name.decode()
        self._clock = clock
        self._count = 0
        self.refreshed: dict[bytes, float] = {}
        """Folder -> when its last refresh began."""
        self.behind_its_back: set[bytes] = set()
        """Paths changed in the under storage without Alluxio having noticed: what a read of them gives is not promised
        (S04), until the mount has new ids for them."""
        self.past: list[tuple[float, float, State]] = []
        """(from, until, state), ended ones."""
        self.since = clock.now()
        self.state: State = {}
        for place in FOLDERS:
            (folder / place.decode().strip("/")).mkdir(exist_ok=True)

    def local(self, path: bytes) -> bytes:
        return os.fsencode(self._folder) + path

    def change(self, what: str, path: bytes, size: int, other: bytes) -> None:
        """One change by the other client; during it both the old and the new state are true. Every third one is made
        behind Alluxio's back."""
        before = self._clock.now()
        state = dict(self.state)
        self._count += 1
        if what == "write":
            content = bytes([self._count % 251 + 1]) * size
            fresh = self.local(b".new")
            with open(fresh, "wb") as file:
                file.write(content)
            os.utime(fresh, (FIRST_MTIME_S, FIRST_MTIME_S + self._count))
            os.replace(fresh, self.local(path))
            state[path] = content
        elif path not in state:
            return
        elif what == "delete":
            os.unlink(self.local(path))
            del state[path]
        elif what == "rename" and other != path:
            os.replace(self.local(path), self.local(other))
            state[other] = state.pop(path)
        if self._count % 3:
            for folder in FOLDERS:
                self._other.entries((b"/" + self._name + folder).rstrip(b"/"), sync_interval_ms=0)
        else:
            self.behind_its_back |= {path, other}
        self.past.append((self.since, self._clock.now(), self.state))
        self.since, self.state = before, state

    def promised(self, folder: bytes, now: float) -> list[State]:
        """Every state that an answer about `folder` may show."""
        oldest = max(now - REFRESH_S, self.refreshed.get(folder, -1.0))
        return [state for _, until, state in self.past if until >= oldest] + [self.state]


def children(state: State, folder: bytes) -> dict[bytes, int]:
    """Name -> length of the files of a folder."""
    return {
        path[len(folder) :]: len(content)
        for path, content in state.items()
        if path.startswith(folder) and b"/" not in path[len(folder) :]
    }


STEP = st.tuples(
    st.sampled_from(["write", "write", "delete", "rename", "list", "list", "stat", "read", "read", "age", "refresh"]),
    st.integers(0, len(FOLDERS) - 1),
    st.integers(0, len(NAMES) - 1),
    st.integers(0, 50_000),
)


@settings(
    max_examples=100, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@example(
    steps=[("write", 0, 0, 10), ("read", 0, 0, 0), ("write", 0, 0, 20_000), ("refresh", 0, 0, 0), ("read", 0, 0, 0)]
)
@given(steps=st.lists(STEP, min_size=5, max_size=30))
async def test_model_every_answer_is_one_of_the_promised_time(scene: Scene, steps: list[Step]) -> None:
    """S02, S05, S06, S09; user reports 15, 16, 18, 19 and 22, with another client as the writer."""
    await run_model(scene, steps)


async def run_model(scene: Scene, steps: list[Step]) -> None:
    """Do the steps in a folder of their own, hold every answer against the model, and the end against the present."""
    name = b"m%d" % next(_numbers)
    (scene.source / name.decode()).mkdir()
    clock = MovableClock()
    model = Model(scene, name, clock)
    async with below_kernel(
        cluster_of(scene.server, local=True), scene.state, path=b"/" + name, clock=clock,
        refresh_s=REFRESH_S, negative_s=60, sync_interval_s=0, read_budget_s=20.0,
    ) as mount:  # fmt: skip
        for step in steps:
            await follow(mount, model, clock, step)
        # Told to look, the mount shows the present.
        for folder in FOLDERS:
            await refresh(mount, model, clock, folder)
            await check_listing(mount, model, clock, folder)
        for path, content in model.state.items():
            assert await mount.read_all(path) == content


SEEN_TOO_LATE: list[Step] = [
    ("write", 0, 0, 10), ("list", 0, 0, 0), ("write", 0, 1, 20), ("age", 0, 0, 50_000), ("age", 0, 0, 50_000),
    ("list", 0, 0, 0),
]  # fmt: skip


async def test_model_sees_a_tree_that_never_looks_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument turns red: listings that stay fresh for ever."""
    await run_model(scene, SEEN_TOO_LATE)
    monkeypatch.setattr(FreshnessPolicy, "fresh_until", lambda self, rule, asked_at, jitter: asked_at + 1e6)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="is none of"), flatten_subgroups=True):
        await run_model(scene, SEEN_TOO_LATE)


async def test_model_sees_bytes_of_another_version(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument turns red: a reader that gives what was never there."""
    steps: list[Step] = [("write", 0, 0, 20_000), ("read", 0, 0, 0)]
    await run_model(scene, steps)
    real = BlockStream.read
    monkeypatch.setattr(BlockStream, "read", lambda *arguments: b"\0" + real(*arguments)[1:])
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="was never there"), flatten_subgroups=True):
        await run_model(scene, steps)


async def follow(mount: BelowKernel, model: Model, clock: MovableClock, step: Step) -> None:
    """One step of the other client, of time, or of an application."""
    what, folder, name, size = step
    path = FOLDERS[folder] + NAMES[name]
    if what == "list":
        await check_listing(mount, model, clock, FOLDERS[folder])
    elif what == "stat":
        await check_stat(mount, model, clock, FOLDERS[folder], path)
    elif what == "read":
        await check_read(mount, model, clock, FOLDERS[folder], path)
    elif what == "age":
        clock.advance(size * REFRESH_S / 25_000)
    elif what == "refresh":
        await refresh(mount, model, clock, FOLDERS[folder])
    else:
        other = FOLDERS[size % len(FOLDERS)] + NAMES[size % len(NAMES)]
        model.change(what, path, size, other)


async def refresh(mount: BelowKernel, model: Model, clock: MovableClock, folder: bytes) -> None:
    began = clock.now()
    await mount.tree.refresh(await mount.inode(folder), force_sync=True)
    model.refreshed[folder] = began
    model.behind_its_back -= {folder + name for name in NAMES}


async def check_listing(mount: BelowKernel, model: Model, clock: MovableClock, folder: bytes) -> None:
    began = clock.now()
    found = {}
    for name, attributes in await mount.listing(folder):
        assert name not in found, "a name twice"
        if folder + name + b"/" not in FOLDERS:
            found[name] = attributes.st_size
    allowed = [children(state, folder) for state in model.promised(folder, began)]
    assert found in allowed, f"{folder!r}: {found} is none of {allowed}"


async def check_stat(mount: BelowKernel, model: Model, clock: MovableClock, folder: bytes, path: bytes) -> None:
    allowed = [state.get(path) for state in model.promised(folder, clock.now())]
    try:
        size: int | None = (await mount.stat(path)).st_size
    except FileNotFoundError:
        size = None
    except FUSEError as failure:
        gone(failure, allowed)
        return
    sizes = [None if content is None else len(content) for content in allowed]
    assert size in sizes, f"{path!r}: {size} is none of {sizes}"


async def check_read(mount: BelowKernel, model: Model, clock: MovableClock, folder: bytes, path: bytes) -> None:
    allowed = [state.get(path) for state in model.promised(folder, clock.now())]
    try:
        content: bytes | None = await mount.read_all(path)
    except FileNotFoundError:
        content = None
    except FUSEError as failure:
        gone(failure, allowed)
        return
    if path in model.behind_its_back:
        return
    assert content in allowed, f"{path!r}: {content and (len(content), sorted(set(content)))} was never there"


def gone(failure: FUSEError, allowed: list[bytes | None]) -> None:
    """An error, only for what has changed within the promised time: ESTALE, or EIO where the under storage has other
    bytes than Alluxio, which has not looked yet (S04), expects."""
    assert failure.errno in (errno.ESTALE, errno.ENOENT, errno.EIO), errno.errorcode[failure.errno]
    assert len(set(allowed)) > 1, f"{errno.errorcode[failure.errno]} for a file that nobody has touched"
