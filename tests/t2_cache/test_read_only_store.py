"""The store of another process, read here: what is there is seen, and nothing else happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusecache.cache.board import StoreIdentity
from fusecache.cache.read_only_store import ReadOnlyStore
from fusecache.cache.store import MetadataStore
from fusecache.errors import StateError
from tests.t2_cache.test_store import entry, opened, put

WRITER = """
import sys
from pathlib import Path
from fusecache import logs
from tests.t2_cache.test_store import entry, opened, put
logs.configure("error")  # a torn file that is dropped is said so
with opened(Path(sys.argv[1]), boot=sys.argv[2]) as store:
    print(repr(tuple(store.identity())), flush=True)
    for line in sys.stdin:
        put(store, *(entry(int(number), b"n" + number.encode()) for number in line.split()))
        print("done", flush=True)
"""

READER = """
import sys
from fusecache.cache.board import StoreIdentity
from fusecache.cache.read_only_store import ReadOnlyStore
store = ReadOnlyStore(boot="boot-1")
store.follow(StoreIdentity(*eval(sys.argv[1])))
with store.read() as txn:
    found = store.entry(txn, 9)
    print(found.name.decode(), flush=True)
    sys.stdin.read()
"""


class Writer:
    """A process that has a store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.identity = StoreIdentity(*eval(self._line()))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def list_root(self, *inodes: int) -> None:
        """A new listing of the mounted folder."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, inodes)) + "\n")
        self.process.stdin.flush()
        assert self._line() == "done\n"


@contextmanager
def writing(folder: Path, boot: str = "boot-1") -> Iterator[Writer]:
    """Until the end of the block, or until the process is killed."""
    command = [sys.executable, "-c", WRITER, str(folder), boot]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writer(process)
        assert process.stdin is not None
        process.stdin.close()


def names(store: ReadOnlyStore) -> list[bytes]:
    with store.read() as txn:
        state = store.folder_state(txn, 1)
        return [] if state is None else [it.name for it in store.page(txn, 1, state.shelf, 0, 100)]


@pytest.fixture
def store() -> Iterator[ReadOnlyStore]:
    store = ReadOnlyStore(boot="boot-1")
    yield store
    store.close()


def test_nothing_is_found_before_a_store_is_followed_and_after_it_was_closed(
    store: ReadOnlyStore, tmp_path: Path
) -> None:
    assert names(store) == []
    with store.read() as txn:
        assert store.entry(txn, 9) is None
        assert store.child(txn, 1, 1, b"n9") is None
    assert store.entry_count() == 0
    with writing(tmp_path / "m") as writer:
        writer.list_root(9)
        store.follow(writer.identity)
        assert names(store) == [b"n9"]
        store.close()
        assert names(store) == []


def test_listings_of_another_process_are_seen_as_they_are_committed(store: ReadOnlyStore, tmp_path: Path) -> None:
    with writing(tmp_path / "m") as writer:
        writer.list_root(9)
        assert store.follow(writer.identity)
        assert names(store) == [b"n9"]
        with store.read() as txn:
            assert store.entry(txn, 9) == entry(9, b"n9")
            state = store.folder_state(txn, 1)
            assert state is not None
            assert state.boot == store.boot
        writer.list_root(9, 10)
        assert names(store) == [b"n9", b"n10"]
        assert store.entry_count() == 2
        assert not store.follow(writer.identity)


def test_killed_writer_leaves_what_it_had_and_the_next_one_goes_on_under_the_reader(
    store: ReadOnlyStore, tmp_path: Path
) -> None:
    with writing(tmp_path / "m") as writer:
        writer.list_root(9)
        store.follow(writer.identity)
        writer.process.kill()
    assert writer.process.returncode == -signal.SIGKILL
    assert names(store) == [b"n9"]
    with writing(tmp_path / "m") as second:
        assert second.identity == writer.identity
        second.list_root(10)
        assert not store.follow(second.identity)
        assert names(store) == [b"n10"]


def test_file_that_was_dropped_and_made_anew_is_opened_anew(store: ReadOnlyStore, tmp_path: Path) -> None:
    with writing(tmp_path / "m") as writer:
        writer.list_root(9)
        store.follow(writer.identity)
        writer.process.kill()
    # The machine stopped meanwhile: the file may be torn, and its next owner drops it.
    with writing(tmp_path / "m", boot="boot-2") as second:
        second.list_root(10)
        assert second.identity.file_inode != writer.identity.file_inode
        assert names(store) == [b"n9"]  # the old file, which is held until the board says so
        assert store.follow(second.identity)
        assert names(store) == [b"n10"]
        with pytest.raises(StateError, match="no longer"):
            store.follow(writer.identity)
        assert names(store) == []


def test_nothing_is_made_where_there_is_no_store(store: ReadOnlyStore, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="can't be read"):
        store.follow(StoreIdentity(str(tmp_path / "m"), "c.h.0", 1 << 20, 1, 1))
    assert list(tmp_path.iterdir()) == []


def test_namespace_that_is_not_there_is_an_error_and_leaves_the_others(store: ReadOnlyStore, tmp_path: Path) -> None:
    with writing(tmp_path / "m") as writer:
        writer.list_root(9)
        with pytest.raises(StateError, match="other"):
            store.follow(writer.identity._replace(namespace="other"))
        assert names(store) == []
        assert store.follow(writer.identity)
        assert names(store) == [b"n9"]


def test_reader_slot_of_a_killed_reader_is_freed(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        put(store, entry(9, b"n9"))
        command = [sys.executable, "-c", READER, repr(tuple(store.identity()))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "n9\n"
            assert str(reader.pid) in readers(store)  # in the middle of a transaction
            assert store.reader_check() == 0
            os.kill(reader.pid, signal.SIGKILL)
        assert str(reader.pid) in readers(store)
        assert store.reader_check() == 1
        assert str(reader.pid) not in readers(store)


def readers(store: MetadataStore) -> str:
    """LMDB's own table: pid, thread, transaction."""
    return str(store._environment.readers())
