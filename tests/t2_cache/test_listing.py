"""A listing reaches the store whole or not at all, in place or by a flip, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.cache.listing import Committed, Intake, ListingLost, shelf_changes, sweep
from fusecache.cache.listing_diff import Change, change_of
from fusecache.cache.record import Entry, encode
from fusecache.cache.store import MetadataStore

FOLDER = 5


def entry(name: bytes, inode: int, mode: int = 0o644, *, parent: int = FOLDER, folder: bool = False) -> Entry:
    return Entry(
        inode, parent, name, folder, True, True, False, False, 5, 10, 1, (), 0, mode, b"o", b"g", 1, b""
    )  # fmt: skip


def records_of(entries: Iterable[Entry]) -> list[tuple[int, bytes]]:
    return [(it.inode, encode(it)) for it in entries]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetadataStore]:
    with MetadataStore(tmp_path / "m", "c1", root_path=b"/", map_bytes=64 << 20, boot="b") as opened:
        yield opened


def take_in(store: MetadataStore, entries: Iterable[Entry], *, folder: int = FOLDER, chunk: int = 4) -> Committed:
    intake = Intake(store, folder, 1.0, chunk=chunk)
    listed = list(entries)
    for start in range(0, len(listed), 3):
        intake.add(records_of(listed[start : start + 3]))
    return intake.commit(incomplete=0)


def changes_of(store: MetadataStore, committed: Committed, *, folder: int = FOLDER) -> list[Change]:
    """As the pusher finds them; releases the old shelf to the sweeper."""
    if committed.old_shelf is None:
        assert committed.diff is not None
        return committed.diff.changes
    changes = list(shelf_changes(store, folder, committed.old_shelf, committed.state.shelf))
    store.held_shelves.discard(committed.old_shelf)
    return changes


def sweep_all(store: MetadataStore, *, limit: int = 3) -> list[int]:
    dead: list[int] = []
    while True:
        swept, found = sweep(store, limit=limit)
        dead.extend(found)
        if not swept:
            return dead


def table_sizes(store: MetadataStore) -> dict[str, int]:
    with store.read() as txn:
        return {name: txn.stat(table)["entries"] for name, table in store.tables._asdict().items() if name != "meta"}


def assert_holds(store: MetadataStore, expected: dict[bytes, Entry], *, folder: int = FOLDER) -> None:
    """The folder's tables hold exactly these entries, however one asks."""
    by_inode = sorted(expected.values())
    with store.read() as txn:
        state = store.folder_state(txn, folder)
        assert state is not None
        assert state.entries == len(expected)
        pages: list[Entry] = []
        while page := store.page(txn, folder, state.shelf, pages[-1].inode if pages else 0, 2):
            assert len(page) <= 2
            pages.extend(page)
        assert pages == by_inode
        assert [found.name for found in store.by_name(txn, folder, state.shelf)] == sorted(expected)
        for name, held in expected.items():
            assert store.child(txn, folder, state.shelf, name) == held
            assert store.entry(txn, held.inode) == held
            assert store.parent_of(txn, held.inode) == folder


LISTINGS = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=1), st.integers(10, 24), st.sampled_from([0o644, 0o600]), st.booleans()
    ),
    max_size=16,
)  # fmt: skip


def cleaned(listing: list[tuple[bytes, int, int, bool]]) -> dict[bytes, Entry]:
    """Names and inodes unique, as a true listing has them."""
    names: dict[bytes, Entry] = {}
    inodes: set[int] = set()
    for name, inode, mode, folder in listing:
        if name not in names and inode not in inodes:
            names[name] = entry(name, inode, mode, folder=folder)
            inodes.add(inode)
    return names


@settings(max_examples=60)
@given(st.lists(LISTINGS, min_size=1, max_size=5), st.sampled_from([1, 2, 5, 100]), st.data())
def test_listing_after_listing_leaves_exactly_the_last_one(
    listings: list[list[tuple[bytes, int, int, bool]]], chunk: int, data: st.DataObject
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        MetadataStore(Path(folder) / "m", "c1", root_path=b"/", map_bytes=64 << 20, boot="b") as store,
    ):
        before: dict[bytes, Entry] = {}
        for number, listing in enumerate(listings):
            now = cleaned(listing)
            committed = take_in(store, data.draw(st.permutations(list(now.values()))), chunk=chunk)
            assert_holds(store, now)
            assert committed.first == (number == 0)
            if number:
                expected = {change_of(before.get(name), now.get(name)) for name in before.keys() | now.keys()}
                changes = changes_of(store, committed)
                assert set(changes) == expected - {None}
                assert len(changes) == len(set(changes))
            with store.read() as txn:
                for gone in {held.inode for held in before.values()} - {held.inode for held in now.values()}:
                    assert store.entry(txn, gone) is None
            before = now
        sweep_all(store)
        assert_holds(store, before)
        # Nothing is left of any earlier listing.
        assert table_sizes(store) == {
            "folders": 1, "children": len(before), "names": len(before), "parents": len(before), "retired": 0,
        }  # fmt: skip


@settings(max_examples=40)
@given(LISTINGS, LISTINGS, st.sampled_from([1, 3, 100]))
def test_listing_with_names_or_ids_twice_leaves_the_tables_consistent(
    first: list[tuple[bytes, int, int, bool]], second: list[tuple[bytes, int, int, bool]], chunk: int
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        MetadataStore(Path(folder) / "m", "c1", root_path=b"/", map_bytes=64 << 20, boot="b") as store,
    ):
        take_in(store, cleaned(first).values(), chunk=chunk)
        hostile = [entry(name, inode, mode, folder=is_folder) for name, inode, mode, is_folder in second]
        changes_of(store, take_in(store, hostile, chunk=chunk))
        sweep_all(store)
        with store.read() as txn:
            state = store.folder_state(txn, FOLDER)
            assert state is not None
            held = {found.name: found for found in store.page(txn, FOLDER, state.shelf, 0, 1000)}
        assert set(held.values()) <= set(hostile)
        assert_holds(store, held)
        assert table_sizes(store)["names"] == table_sizes(store)["children"] == len(held)


@pytest.mark.parametrize("arrived", [0, 2, 9, 30])
def test_listing_that_breaks_off_changes_nothing(store: MetadataStore, arrived: int) -> None:
    old = {held.name: held for held in (entry(b"o%d" % number, 100 + number) for number in range(10))}
    take_in(store, old.values())
    with store.read() as txn:
        state = store.folder_state(txn, FOLDER)
    intake = Intake(store, FOLDER, 2.0, chunk=4)
    intake.add(records_of(entry(b"n%d" % number, 200 + number) for number in range(arrived)))
    intake.abandon()
    assert_holds(store, old)
    with store.read() as txn:
        assert store.folder_state(txn, FOLDER) == state
    sweep_all(store)
    assert_holds(store, old)
    assert table_sizes(store)["children"] == table_sizes(store)["parents"] == len(old)


def test_listing_interrupted_by_a_restart_is_swept(tmp_path: Path) -> None:
    old = {held.name: held for held in (entry(b"o%d" % number, 100 + number) for number in range(10))}
    with MetadataStore(tmp_path / "m", "c1", root_path=b"/", map_bytes=64 << 20, boot="b") as store:
        take_in(store, old.values())
        Intake(store, FOLDER, 2.0, chunk=4).add(
            records_of(entry(b"n%d" % number, 200 + number) for number in range(30))
        )
    with MetadataStore(tmp_path / "m", "c1", root_path=b"/", map_bytes=64 << 20, boot="b") as store:
        assert table_sizes(store)["children"] > len(old)
        sweep_all(store)
        assert_holds(store, old)
        assert table_sizes(store)["children"] == table_sizes(store)["parents"] == len(old)


@pytest.mark.parametrize("chunk", [2, 100])
def test_listing_of_a_large_unchanged_folder_writes_no_record(store: MetadataStore, chunk: int) -> None:
    held = {it.name: it for it in (entry(b"%d" % number, 100 + number) for number in range(50))}
    first = take_in(store, held.values(), chunk=chunk)
    again = take_in(store, reversed(held.values()), chunk=chunk)
    assert again.state.shelf == first.state.shelf
    assert not again.touched
    assert again.diff is not None
    assert again.diff.total == 0


def test_listing_whose_block_locations_moved_is_stored_but_is_no_change(store: MetadataStore) -> None:
    take_in(store, [entry(b"a", 9)])
    moved = entry(b"a", 9)._replace(locations=((1, 2),))
    again = take_in(store, [moved])
    assert again.touched
    assert again.diff is not None
    assert again.diff.total == 0
    assert_holds(store, {b"a": moved})


@pytest.mark.parametrize("chunk", [1, 100])
def test_listing_with_two_names_swapped(store: MetadataStore, chunk: int) -> None:
    take_in(store, [entry(b"a", 9), entry(b"b", 10)], chunk=chunk)
    swapped = take_in(store, [entry(b"a", 10), entry(b"b", 9)], chunk=chunk)
    assert set(changes_of(store, swapped)) == {
        Change("replaced", FOLDER, b"a", 9),
        Change("replaced", FOLDER, b"b", 10),
    }
    sweep_all(store)
    assert_holds(store, {b"a": entry(b"a", 10), b"b": entry(b"b", 9)})


@pytest.mark.parametrize("chunk", [1, 100])
def test_listing_without_a_folder_takes_everything_below_it(store: MetadataStore, chunk: int) -> None:
    take_in(store, [entry(b"d", 20, folder=True), entry(b"f", 21)], chunk=chunk)
    take_in(store, [entry(b"e", 30, parent=20, folder=True)], folder=20, chunk=chunk)
    take_in(store, [entry(b"x", 40, parent=30)], folder=30, chunk=chunk)
    committed = take_in(store, [entry(b"f", 21)], chunk=chunk)
    changes_of(store, committed)
    dead = {*committed.dead_folders, *sweep_all(store)}
    assert dead == {20, 30}
    with store.read() as txn:
        assert [store.entry(txn, inode) for inode in (20, 30, 40)] == [None, None, None]
    assert table_sizes(store) == {"folders": 1, "children": 1, "names": 1, "parents": 1, "retired": 0}


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("new_first", [True, False])
def test_folder_that_moved_is_found_in_its_new_place(store: MetadataStore, chunk: int, new_first: bool) -> None:
    take_in(store, [entry(b"d", 20, folder=True), *(entry(b"%d" % n, 50 + n) for n in range(3))], chunk=chunk)
    take_in(store, [entry(b"x", 40, parent=20)], folder=20, chunk=chunk)
    source = [entry(b"%d" % n, 50 + n) for n in range(3)]
    target = [entry(b"moved", 20, parent=6, folder=True), *(entry(b"%d" % n, 60 + n, parent=6) for n in range(3))]
    if new_first:
        take_in(store, target, folder=6, chunk=chunk)
        changes_of(store, take_in(store, source, chunk=chunk))
        sweep_all(store)
        with store.read() as txn:
            found = store.entry(txn, 40)
        assert found == entry(b"x", 40, parent=20)
    else:
        changes_of(store, take_in(store, source, chunk=chunk))
        sweep_all(store)
        take_in(store, target, folder=6, chunk=chunk)
    with store.read() as txn:
        assert store.entry(txn, 20) == target[0]


def test_listing_into_a_store_that_was_emptied_meanwhile_is_refused(store: MetadataStore) -> None:
    take_in(store, [entry(b"a", 9)])
    for arrived in (1, 20):
        intake = Intake(store, FOLDER, 2.0, chunk=4)
        intake.add(records_of(entry(b"n%d" % number, 200 + number) for number in range(arrived)))
        store.writer.run(store.reset)
        with pytest.raises(ListingLost):
            intake.commit(incomplete=0)
        take_in(store, [entry(b"a", 9)])


def test_memory_of_a_listing_in_flight_is_bounded_by_the_chunk(store: MetadataStore) -> None:
    intake = Intake(store, FOLDER, 1.0, chunk=50)
    for start in range(0, 5000, 500):
        intake.add(records_of(entry(b"%d" % number, 100 + number) for number in range(start, start + 500)))
        assert len(intake._changed) <= 50 + 50
    intake.commit(incomplete=0)


@pytest.mark.parametrize("chunk", [1, 100])
def test_folder_that_moved_and_came_back_is_found_again(store: MetadataStore, chunk: int) -> None:
    # Its old folder's listing is unchanged, but the other one's claimed it in between.
    take_in(store, [entry(b"d", 20, folder=True)], chunk=chunk)
    take_in(store, [entry(b"d", 20, parent=6, folder=True)], folder=6, chunk=chunk)
    take_in(store, [entry(b"d", 20, folder=True)], chunk=chunk)
    changes_of(store, take_in(store, [], folder=6, chunk=chunk), folder=6)
    sweep_all(store)
    assert_holds(store, {b"d": entry(b"d", 20, folder=True)})
