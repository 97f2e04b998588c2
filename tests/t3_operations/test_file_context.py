"""When bytes from the under storage are confirmed, and by what (S03)."""

from __future__ import annotations

import pytest

from fusecache.cache.known import Listing
from fusecache.cache.record import Entry
from fusecache.config.settings import Settings
from fusecache.daemon.file_context import CONFIRM_AGE_S, RELIST_AFTER, RELIST_ENTRIES, MetadataFileContext
from fusecache.errors import NotFound, StaleId, Unavailable
from tests.support.clocks import MovedClock

FOLDER = 77


class FakeTree:
    def __init__(self, listing: Listing | None) -> None:
        self.listing = listing

    def path(self, inode: int) -> bytes:
        return b"/d/f"

    def listing_of(self, inode: int) -> Listing | None:
        assert inode == FOLDER
        return self.listing


class FakeClient:
    """Answers GetStatus with the id that the path has now."""

    def __init__(self, file_id: int | None) -> None:
        self.file_id = file_id
        self.asked: list[tuple[bytes, int]] = []

    def get_status(self, path: bytes, *, sync_interval_ms: int, budget: object) -> object:
        self.asked.append((path, sync_interval_ms))
        if self.file_id is None:
            raise NotFound("gone")
        return type("Status", (), {"file_id": self.file_id})()


def entry(inode: int) -> Entry:
    return Entry(
        inode, FOLDER, b"f", False, True, True, False, False, 10, 10, 1, (), 0, 0o644, b"", b"", 1, b""
    )  # fmt: skip


class Bench:
    def __init__(self, *, listed_s_ago: float | None, entries: int = 100, file_id: int | None = 8) -> None:
        self.clock = MovedClock()
        listing = None if listed_s_ago is None else Listing(self.clock.time_s - listed_s_ago, entries, False)
        self.tree, self.client, self.relisted = FakeTree(listing), FakeClient(file_id), []
        self.context = MetadataFileContext(
            self.tree,
            self.client,
            Settings(),
            self.clock,
            list_again=self.relisted.append,  # type: ignore[arg-type]
            confirm_stored=lambda entry, fd: False,
        )

    def check(self, *, whole: bool) -> None:
        self.context.confirm(entry(9), whole=whole)()


def test_confirm_file_in_pieces_is_always_asked_for() -> None:
    bench = Bench(listed_s_ago=0.1)
    bench.check(whole=False)
    assert bench.client.asked == [(b"/d/f", -1)]  # -1: what Alluxio has noticed, without a look at the under storage


def test_confirm_whole_file_of_a_young_listing_needs_no_call() -> None:
    bench = Bench(listed_s_ago=CONFIRM_AGE_S - 1)
    bench.check(whole=True)
    assert not bench.client.asked


def test_confirm_without_asking_says_when_it_is_not_known() -> None:
    bench = Bench(listed_s_ago=CONFIRM_AGE_S + 1)
    with pytest.raises(Unavailable):
        bench.context.confirm(entry(9), whole=True)(0.0)
    assert not bench.client.asked
    bench = Bench(listed_s_ago=1.0)
    bench.context.confirm(entry(9), whole=True)(0.0)
    assert not bench.client.asked


def test_confirm_age_counts_when_the_bytes_are_there_not_when_they_were_asked_for() -> None:
    bench = Bench(listed_s_ago=CONFIRM_AGE_S - 1)
    check = bench.context.confirm(entry(9), whole=True)
    bench.clock.sleep(2)
    check()
    assert len(bench.client.asked) == 1


@pytest.mark.parametrize("listed_s_ago", [CONFIRM_AGE_S + 1, None])
def test_confirm_whole_file_of_an_old_or_no_listing_is_asked_for(listed_s_ago: float | None) -> None:
    bench = Bench(listed_s_ago=listed_s_ago)
    bench.check(whole=True)
    assert len(bench.client.asked) == 1


def test_confirm_another_id_or_none_is_stale() -> None:
    """S02, S03: the old id is never answered with what the path has become."""
    for file_id in (9, None):
        bench = Bench(listed_s_ago=60, file_id=file_id)
        with pytest.raises(StaleId):
            bench.check(whole=True)
        assert len(bench.client.asked) == 1


def test_confirm_after_bytes_failed_makes_alluxio_compare() -> None:
    """Also a change behind Alluxio's back is then ESTALE, which opening the path again heals, not EIO for ever."""
    bench = Bench(listed_s_ago=0.1)
    bench.context.confirm(entry(9), whole=True)(5.0, compare=True)
    assert bench.client.asked == [(b"/d/f", 0)]


def test_confirm_many_files_of_a_folder_list_it_again_once() -> None:
    bench = Bench(listed_s_ago=60)
    for _ in range(RELIST_AFTER):
        bench.check(whole=True)
    assert bench.relisted == [9]
    bench.tree.listing = Listing(bench.clock.now(), 100, False)
    for _ in range(50):
        bench.check(whole=True)
    assert len(bench.client.asked) == RELIST_AFTER


def test_confirm_very_large_folder_is_not_listed_for_it() -> None:
    bench = Bench(listed_s_ago=60, entries=RELIST_ENTRIES + 1)
    for _ in range(3 * RELIST_AFTER):
        bench.check(whole=True)
    assert not bench.relisted
