"""The board: what is written there is what is read, whoever dies in between."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.cache import board as board_module
from fusecache.cache.board import BOARD_BYTES, BoardReader, BoardWriter, Notice, StoreIdentity, folder_mark, inode_mark
from fusecache.cache.overlay import Overlay
from fusecache.cache.record import Entry
from fusecache.errors import StateError

IDENTITY = StoreIdentity("/state/metadata", "cluster.hash.0", 1 << 30, 5, 99)
ROOT = Entry(1, 1, b"", True, True, True, False, False, 0, 0, 0, (), 7, 0o755, b"o", b"g", 1, b"s3://b")


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("board")
    yield fd
    os.close(fd)


def file_entry(inode: int, name: bytes, parent: int = 1) -> Entry:
    return Entry(inode, parent, name, False, True, True, False, False, 5, 10, 1, (), 0, 0o644, b"o", b"g", 1, b"")


def test_epoch_is_the_first_number_of_the_memory(descriptor: int) -> None:
    writer, reader = BoardWriter(descriptor), BoardReader(descriptor)
    before = reader.epoch[0]
    writer.bump()
    assert reader.epoch[0] == before + 1
    assert int.from_bytes(os.pread(descriptor, 8, 0), "little") == before + 1
    assert os.fstat(descriptor).st_size == BOARD_BYTES
    writer.close()
    reader.close()


def test_memory_made_with_a_page_is_enlarged_and_a_reader_may_be_first(descriptor: int) -> None:
    os.ftruncate(descriptor, 4096)
    reader = BoardReader(descriptor)
    assert reader.read() is None
    writer = BoardWriter(descriptor)
    writer.publish(IDENTITY, None, 3.0)
    assert reader.read() == Notice(IDENTITY, None, 3.0)
    writer.close()
    reader.close()


def test_memory_that_can_not_grow_is_refused() -> None:
    with os.fdopen(os.open("/dev/null", os.O_RDWR)) as null, pytest.raises(StateError, match="shared memory"):
        BoardReader(null.fileno())


def test_notice_stays_over_every_epoch_and_over_the_writer(descriptor: int) -> None:
    first = BoardWriter(descriptor)
    first.publish(IDENTITY, ROOT, 12.5)
    reader = BoardReader(descriptor)
    for _ in range(5):
        assert reader.read() == Notice(IDENTITY, ROOT, 12.5)
        first.bump()
    epoch = reader.epoch[0]
    first.close()
    second = BoardWriter(descriptor)
    assert second.before == Notice(IDENTITY, ROOT, 12.5)
    assert reader.epoch[0] > epoch
    assert reader.read() == Notice(IDENTITY, ROOT, 12.5)
    second.publish(IDENTITY._replace(namespace="other"), None, 13.0)
    found = reader.read()
    assert found is not None
    assert found.store.namespace == "other"
    second.close()
    reader.close()


def test_writer_that_died_while_it_wrote_leaves_the_last_notice(descriptor: int) -> None:
    writer = BoardWriter(descriptor)
    writer.publish(IDENTITY, ROOT, 12.5)
    # What `bump` does before the epoch moves, broken off in the middle.
    at = writer._slot_at(writer.epoch[0] + 1)
    writer._view[at : at + 40] = b"\xff" * 40
    reader = BoardReader(descriptor)
    assert reader.read() == Notice(IDENTITY, ROOT, 12.5)
    writer.close()
    assert BoardWriter(descriptor).before == Notice(IDENTITY, ROOT, 12.5)
    reader.close()


def test_damaged_notice_is_an_error_for_readers_and_nothing_for_the_next_writer(descriptor: int) -> None:
    writer = BoardWriter(descriptor)
    writer.publish(IDENTITY, ROOT, 12.5)
    at = writer._slot_at(writer.epoch[0]) + 20
    writer._view[at] ^= 0xFF
    reader = BoardReader(descriptor)
    with pytest.raises(StateError, match="damaged"):
        reader.read()
    writer.close()
    second = BoardWriter(descriptor)
    assert second.before is None
    second.publish(IDENTITY, None, 1.0)
    assert reader.read() == Notice(IDENTITY, None, 1.0)
    second.close()
    reader.close()


def test_root_that_does_not_fit_is_left_out(descriptor: int) -> None:
    writer, reader = BoardWriter(descriptor), BoardReader(descriptor)
    writer.publish(IDENTITY, ROOT._replace(ufs_path=b"s3://" + b"x" * 20_000), 12.5)
    assert reader.read() == Notice(IDENTITY, None, 12.5)
    writer.close()
    reader.close()


def test_marks_are_counted_and_gone_with_their_writer(descriptor: int) -> None:
    writer, reader = BoardWriter(descriptor), BoardReader(descriptor)
    mark = folder_mark(7)
    writer.mark(mark)
    writer.mark(mark)
    writer.unmark(mark)
    assert reader.marked(mark)
    writer.unmark(mark)
    assert not reader.marked(mark)
    writer.mark(mark)
    writer.close()
    second = BoardWriter(descriptor)
    assert not reader.marked(mark)
    second.close()
    reader.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "drop"]),
        st.integers(2, 12),
        st.integers(1, 3),
        st.sampled_from([b"a", b"b", b"c"]),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_exactly_what_the_overlay_has_is_marked(operations: list[tuple[str, int, int, bytes]]) -> None:
    descriptor = os.memfd_create("board")
    writer, reader = BoardWriter(descriptor), BoardReader(descriptor)
    try:
        overlay = Overlay(lambda: 0.0, 20.0, max_entries=5, board=writer)
        for kind, inode, folder, name in operations:
            if kind == "put":
                overlay.put(file_entry(inode, name, folder), 1.0)
            else:
                overlay.drop(inode)
        for inode in range(2, 13):
            assert reader.marked(inode_mark(inode)) == (overlay.get(inode) is not None)
        for folder in (1, 2, 3):
            assert reader.marked(folder_mark(folder)) == bool(overlay.of_folder(folder))
            for name in (b"a", b"b", b"c"):
                assert reader.marked(board_module.name_mark(folder, name)) == (overlay.child(folder, name) is not None)
    finally:
        writer.close()
        reader.close()
        os.close(descriptor)
