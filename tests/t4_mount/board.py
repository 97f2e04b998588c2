"""Mounts that tests of one open mode share, because starting one takes longer than most tests.

A `Board` belongs to one mode. `shared(kind)` is started when it is first asked for and unmounted, strictly, after the
mode's last test; a test gets a folder of its own in it (`place`). What can't be shared (other settings, faults, a
mount that is killed) is mounted by the test with `own`.

In passthrough mode the sources lie on another file system than the state: block files are then copies, and not hard
links, which the gate refuses because somebody could write to them by their other name.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.t4_mount.live_mount import PATIENCE_S, EmbeddedProcess, LiveMount, eventually, live_mount
from tests.t4_mount.modes import OpenMode

Kind = Literal["folder", "cluster", "uncached", "blocks", "quick", "unsynced", "large"]

BLOCK = 64 << 10
"""Block size of the clusters: files of a few hundred kilobytes have several blocks."""

MEMORY = Path("/dev/shm")

STORED_S = 2.0
"""How long a block that was read may take until it is stored, before it is read again."""

_STREAMED = ("--no-zero-rpc-reads", "--fetch-bytes", "512KiB")
"""Every byte comes through a stream, in fetches of several blocks."""

_FLAGS: dict[Kind, Sequence[str]] = {
    # One block file per file. The kernel keeps everything for hours: what shows a change is a push.
    "folder": ("--refresh-s", "6h", "--owner-map", "7001=1234", "--group-map", "7002=1235"),
    # Two block workers, small blocks.
    "cluster": ("--refresh-s", "6h", *_STREAMED),
    # ... that nobody stores.
    "uncached": ("--refresh-s", "6h", "--read-type", "no_cache", *_STREAMED),
    # Several block files per file, read without a call.
    "blocks": ("--refresh-s", "6h"),
    # Lists again after a second, and has the server compare each time.
    "quick": ("--refresh-s", "1", "--sync-interval-s", "0"),
    # Never asks the server to compare.
    "unsynced": ("--sync-interval-s", "-1", "--read-budget-s", "20", *_STREAMED),
    # One block per file, however large, and always a hard link to it. What never changes needs no second look, which
    # would find that the source is gone.
    "large": ("--immutable",),
}

Cluster = Literal["one", "two", "large"]


class _Server(NamedTuple):
    block_workers: int
    block_bytes: int


_SERVERS: dict[Cluster, _Server] = {"one": _Server(1, BLOCK), "two": _Server(2, BLOCK), "large": _Server(1, 8 << 30)}

_CLUSTERS: dict[Kind, Cluster] = {
    "cluster": "two",
    "uncached": "two",
    "blocks": "one",
    "quick": "one",
    "unsynced": "one",
    "large": "large",
}
"""The server that a kind of mount reads from; the others have one of their own, over a folder."""


def started(*kinds: Kind) -> Any:
    """A module's fixture that starts shared mounts before its first test: what a test starts itself, it has to end.

    `shared_mounts = started("folder", "quick")`
    """

    @pytest.fixture(scope="module", autouse=True)
    def shared_mounts(board: Board) -> None:
        for kind in kinds:
            board.shared(kind)

    return shared_mounts


_PASSED_THROUGH: dict[Kind, int] = {"folder": 1 << 30, "blocks": BLOCK, "quick": BLOCK, "large": 8 << 30}
"""Block size of the kinds whose mounts look at block files."""


class Place(NamedTuple):
    """A folder of a test's own in a shared mount."""

    mount: LiveMount
    source: Path
    """Write here ..."""
    shown: Path
    """... and read here."""
    passed_through: int
    """Files of at most so many bytes are read by the kernel itself once they are local; 0: none."""

    @property
    def path(self) -> str:
        """Below the mount's root."""
        return self.shown.name

    def refresh(self) -> None:
        """As `fusecache refresh` of the folder does it."""
        self.mount.refresh(self.path)

    def warm(self, *names: str) -> None:
        """Read files once, and wait until they are local and, where they can be, passed through when opened."""
        paths = [self.shown / name for name in names or sorted(os.listdir(self.source))]
        for path in paths:
            warm(path)
        ours = [path for path in paths if 0 < path.stat().st_size <= self.passed_through]

        def passed_through() -> bool:
            before = self.mount.passthrough_opens()
            for path in ours:
                os.close(os.open(path, os.O_RDONLY))
            return self.mount.passthrough_opens() - before == len(ours)

        # The first open of a block has its version confirmed; the one after it is passed through.
        eventually(passed_through, f"passed through: {len(ours)} files")


def warm(path: Path) -> None:
    """Read a file to its end until all of it is in this node's block worker.

    Once is not always enough: a block that somebody else is just storing is not stored for this reader too.
    """
    size = path.stat().st_size
    deadline = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.read(descriptor, 1 << 20):
                pass
        finally:
            os.close(descriptor)
        again_at = time.monotonic() + STORED_S
        while time.monotonic() < again_at:
            if int(os.getxattr(path, "user.fusecache.local_bytes")) == size:
                return
            time.sleep(0.01)
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: all of {path.name} is local"


class Board:
    """See the module's docstring. A context manager: leaving it unmounts everything."""

    def __init__(self, mode: OpenMode, folder: Path) -> None:
        """`folder` is the mode's own, for state and mount points."""
        self.mode = mode
        self._folder = folder
        self._stack = ExitStack()
        self._mounts: dict[Kind, LiveMount] = {}
        self._sources: dict[Kind, Path] = {}
        self._clusters: dict[Cluster, EmbeddedProcess] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Board:
        if self.mode.passthrough:
            self._memory = Path(tempfile.mkdtemp(dir=MEMORY, prefix="fusecache-sources-"))
            self._memory.chmod(0o755)
            self._stack.callback(shutil.rmtree, self._memory)
            assert self._memory.stat().st_dev != self._folder.stat().st_dev, "block files would be hard links"
        else:
            self._memory = self._folder / "sources"
            self._memory.mkdir()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    def new_source(self, name: str = "source") -> Path:
        """An empty folder to be served, where its block files will be what the mode needs."""
        folder = self._memory / f"{next(self._numbers)}-{name}"
        folder.mkdir()
        return folder

    @contextmanager
    def own(self, source: str | Path, folder: Path, *flags: str, name: str = "mnt") -> Iterator[LiveMount]:
        """A mount of the test's own in this mode, with state below `folder`; strictly unmounted at the end."""
        with live_mount(source, folder, *self.mode.flags, *flags, name=name) as mount:
            assert mount.open_mode() == self.mode.served
            yield mount

    def shared(self, kind: Kind) -> LiveMount:
        """The mode's mount of this kind, started by whoever asks first."""
        if kind not in self._mounts:
            in_cluster = _CLUSTERS.get(kind)
            if in_cluster is None:
                source: str | Path = self.new_source(kind)
                self._sources[kind] = Path(source)
            else:
                cluster = self.cluster(in_cluster)
                self._sources[kind] = cluster.folder
                source = cluster.url
            mount = self._stack.enter_context(self.own(source, self._folder / kind, *_FLAGS[kind]))
            self._mounts[kind] = mount
            if kind == "folder" and self.mode.passthrough:
                self._prove_passthrough(mount)
        return self._mounts[kind]

    def cluster(self, name: Cluster) -> EmbeddedProcess:
        """A server that mounts share."""
        if name not in self._clusters:
            workers, block_bytes = _SERVERS[name]
            flags = ("--block-workers", str(workers), "--block-size-bytes", str(block_bytes))
            if name == "large":
                source = self._folder / "large-source"  # beside its state: nobody copies gigabytes
                source.mkdir()
            else:
                source = self.new_source(name)
            server = EmbeddedProcess(source, self._folder / f"embedded-{name}", *flags)
            self._clusters[name] = self._stack.enter_context(server)
        return self._clusters[name]

    def cluster_folder(self, name: str, cluster: Cluster = "one") -> tuple[Path, str]:
        """A new, empty folder that a shared server serves, and its SOURCE for a mount of the test's own."""
        name = f"{next(self._numbers)}-{name}"
        folder = self.cluster(cluster).folder / name
        folder.mkdir()
        return folder, self.cluster(cluster).url + name

    def place(self, kind: Kind, name: str) -> Place:
        """A new, empty folder in the shared mount of this kind."""
        mount = self.shared(kind)
        name = f"{next(self._numbers)}-{name}"
        (self._sources[kind] / name).mkdir()
        mount.refresh()
        passed_through = _PASSED_THROUGH.get(kind, 0) if self.mode.passthrough else 0
        return Place(mount, self._sources[kind] / name, mount.root / name, passed_through)

    def copy_logs(self) -> None:
        """What the shared mounts have written since the last call, to this test's standard error."""
        for mount in self._mounts.values():
            mount.mount.copy_stderr()

    def _prove_passthrough(self, mount: LiveMount) -> None:
        """Before any test relies on it: the kernel reads a block file itself."""
        place = self.place("folder", "proof")
        (place.source / "f").write_bytes(b"passed through")
        place.warm("f")
        assert (place.shown / "f").read_bytes() == b"passed through"
        assert mount.passthrough_opens() > 0, mount.gate()
