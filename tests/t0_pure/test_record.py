"""Records: what is written comes back, and nothing else is taken for a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.alluxio.model import MAX_ID, FileStatus
from fusecache.cache.record import (
    UNKNOWN_UFS_PATH,
    Entry,
    RecordError,
    decode,
    encode,
    entry_from_status,
    is_folder,
    join_ufs_path,
    name_of,
)

U63 = st.integers(0, (1 << 63) - 1)
NAMES = st.binary(min_size=1, max_size=255)
LOCATIONS = st.lists(st.lists(U63, max_size=4).map(tuple), max_size=5).map(tuple)
ENTRIES = st.builds(
    Entry,
    inode=st.integers(2, MAX_ID + 1),
    parent=st.integers(1, MAX_ID + 1),
    name=NAMES,
    folder=st.booleans(),
    completed=st.booleans(),
    persisted=st.booleans(),
    in_ufs_tier=st.booleans(),
    mount_point=st.booleans(),
    length=U63,
    block_size=U63,
    block_count=U63,
    locations=LOCATIONS,
    mtime_ms=st.integers(-(1 << 63), (1 << 63) - 1),
    mode=st.integers(0, 0o7777),
    owner=st.binary(max_size=255),
    group=st.binary(max_size=255),
    mount_id=U63,
    ufs_path=st.binary(max_size=300),
)
PLAIN = Entry(
    9, 1, b"a.jpg", False, True, True, False, False, 110_000, 64 << 20, 1, ((77,),), 1_700_000_000_000, 0o644,
    b"alluxio", b"staff", 1, b"",
)  # fmt: skip


@given(ENTRIES)
def test_record_of_any_entry_comes_back_equal(entry: Entry) -> None:
    record = encode(entry)
    assert decode(entry.inode, entry.parent, record) == entry
    assert name_of(record) == entry.name
    assert is_folder(record) == entry.folder


@given(st.binary(max_size=200) | st.binary(max_size=200).map(b"\x01".__add__))
def test_record_from_any_bytes_is_an_entry_or_a_record_error(data: bytes) -> None:
    try:
        entry = decode(9, 1, data)
    except RecordError:
        return
    assert decode(9, 1, encode(entry)) == entry


@given(ENTRIES, st.data())
def test_record_that_was_cut_or_grew_is_refused(entry: Entry, data: st.DataObject) -> None:
    record = encode(entry)
    with pytest.raises(RecordError):
        decode(9, 1, record[: data.draw(st.integers(0, len(record) - 1))])
    with pytest.raises(RecordError):
        decode(9, 1, record + b"\0")


def test_record_of_another_version_is_refused() -> None:
    record = bytearray(encode(PLAIN))
    record[0] += 1
    with pytest.raises(RecordError, match="version"):
        decode(9, 1, bytes(record))


@pytest.mark.parametrize(
    "impossible",
    [
        {"name": b"n" * 256},
        {"owner": b"o" * 256},
        {"length": -1},
        {"length": 1 << 64},
        {"mode": -1},
        {"ufs_path": b"u" * 70_000},
        {"mount_id": 1 << 63},
        {"locations": ((1 << 63,),)},
        {"locations": (tuple(range(256)),)},
    ],
)
def test_record_of_an_entry_out_of_range_is_refused(impossible: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        encode(PLAIN._replace(**impossible))  # type: ignore[arg-type]


def test_record_of_a_usual_file_is_small() -> None:
    # 1,000,000 files must fit into 300 MB together with keys and two more tables.
    assert len(encode(PLAIN)) - len(PLAIN.name) <= 70


def test_record_keeps_no_path_below_its_own_name() -> None:
    status = FileStatus(
        8, b"b", b"/x/a/b", False, True, True, False, False, 5, 10, 1, (), 0, 0o644, b"", b"", 1, b"s3://u/a/b"
    )
    assert entry_from_status(status, 7, b"s3://u/a").ufs_path == b""
    assert entry_from_status(status, 7, b"s3://u/a/").ufs_path == b""
    assert entry_from_status(status, 7, b"s3://other").ufs_path == b"s3://u/a/b"
    assert entry_from_status(status, 7, None).ufs_path == b"s3://u/a/b"
    assert entry_from_status(status, 7, None).inode == 9
    # Unknown must not become "the folder's path and the name".
    assert entry_from_status(status._replace(ufs_path=b""), 7, b"s3://u/a").ufs_path == UNKNOWN_UFS_PATH


def test_ufs_path_is_joined_as_alluxio_does() -> None:
    assert join_ufs_path(b"/mnt/data", b"a") == b"/mnt/data/a"
    assert join_ufs_path(b"s3://bucket/", b"a") == b"s3://bucket/a"
