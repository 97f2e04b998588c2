"""Differences between two listings: exactly what happened, and nothing that nobody can see."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.cache.listing_diff import MAX_KEPT_CHANGES, Change, Diff, change_of, diff_sorted
from fusecache.cache.record import Entry


def entry(name: bytes, inode: int, mode: int = 0o644) -> Entry:
    return Entry(
        inode, 7, name, False, True, True, False, False, 5, 10, 1, ((1,),), 0, mode, b"o", b"g", 1, b""
    )  # fmt: skip


NAMES = st.binary(min_size=1, max_size=2)
LISTINGS = st.dictionaries(NAMES, st.tuples(st.integers(2, 12), st.sampled_from([0o644, 0o600])), max_size=12)


def as_entries(listing: dict[bytes, tuple[int, int]]) -> list[Entry]:
    return [entry(name, inode, mode) for name, (inode, mode) in sorted(listing.items())]


@given(LISTINGS, LISTINGS)
def test_diff_of_two_listings_is_what_each_name_says(
    old: dict[bytes, tuple[int, int]], new: dict[bytes, tuple[int, int]]
) -> None:
    expected = set()
    for name in old.keys() | new.keys():
        if name not in new:
            expected.add(Change("removed", 7, name, old[name][0]))
        elif name not in old:
            expected.add(Change("added", 7, name, new[name][0]))
        elif old[name][0] != new[name][0]:
            expected.add(Change("replaced", 7, name, old[name][0]))
        elif old[name][1] != new[name][1]:
            expected.add(Change("attributes", 7, name, old[name][0]))
    changes = list(diff_sorted(as_entries(old), as_entries(new)))
    assert set(changes) == expected
    assert len(changes) == len(expected)


@given(LISTINGS)
def test_diff_of_equal_listings_is_empty(listing: dict[bytes, tuple[int, int]]) -> None:
    assert list(diff_sorted(as_entries(listing), as_entries(listing))) == []


def test_diff_ignores_what_no_application_sees() -> None:
    old = entry(b"a", 9)
    for hidden in ({"locations": ((4, 5),)}, {"persisted": False}, {"ufs_path": b"x"}, {"mount_id": 4}):
        assert change_of(old, old._replace(**hidden)) is None  # type: ignore[arg-type]


def test_diff_sees_every_attribute_that_stat_shows() -> None:
    old = entry(b"a", 9)
    for seen in ({"length": 6}, {"mtime_ms": 1}, {"mode": 0o600}, {"owner": b"x"}, {"group": b"x"}):
        change = change_of(old, old._replace(**seen))  # type: ignore[arg-type]
        assert change == Change("attributes", 7, b"a", 9)


def test_diff_counts_all_changes_but_keeps_a_bounded_number() -> None:
    diff = Diff()
    for number in range(MAX_KEPT_CHANGES + 10):
        diff.count(Change("added", 7, b"%d" % number, number + 2))
    assert diff.added == diff.total == MAX_KEPT_CHANGES + 10
    assert len(diff.changes) == MAX_KEPT_CHANGES
    assert not diff.complete
    assert diff.names_changed


def test_diff_of_attributes_alone_leaves_the_names() -> None:
    diff = Diff()
    diff.count(Change("attributes", 7, b"a", 9))
    assert diff.complete
    assert not diff.names_changed
