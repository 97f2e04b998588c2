"""The tree's answers: who is asked, how often, and what is said when nobody answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache.alluxio.model import FileStatus
from fusecache.cache.freshness import PATIENT_ENTRIES, DatasetRule, FreshnessPolicy
from fusecache.cache.listing_diff import Change
from fusecache.cache.loader import Loader
from fusecache.cache.tree import ROOT
from fusecache.errors import NotFound, PermissionDenied, ProtocolError, StaleId, StateError, Unavailable
from tests.support.log_noise import Declare
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t2_cache.harness import REFRESH_S, Mounted, mounted


@pytest.fixture
def model() -> AlluxioModel:
    found = AlluxioModel(piece=3)
    found.mkdir(b"/d")
    for number in range(10):
        found.write(b"/d/f%d" % number, number)
    found.mkdir(b"/d/sub")
    found.write(b"/d/sub/x", 7)
    return found


async def until(condition: Callable[[], object]) -> None:
    """Wait (in real time: threads do the work) until something holds."""
    for _ in range(5000):
        if condition():
            return
        await trio.to_thread.run_sync(threading.Event().wait, 0.002)
    raise AssertionError("condition never held")


def loader(use: Mounted) -> Loader:
    assert use.tree._loader is not None
    return use.tree._loader


class Gate:
    """Holds calls of one path (None = of all) in their threads until opened."""

    def __init__(self, model: AlluxioModel, path: bytes | None) -> None:
        self._path = path
        self._open = threading.Event()
        self.waiting = 0
        model.before_answer = self._wait

    def _wait(self, path: bytes) -> None:
        if self._path in (path, None):
            self.waiting += 1
            assert self._open.wait(20)

    def open(self) -> None:
        self._open.set()


# ---- who is asked ----


async def test_children_list_each_folder_once_and_ask_for_no_file(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entries = await use.list_all(ROOT)
        assert [entry.name for entry in entries] == [b"d"]
        names = {entry.name for entry in await use.list_all(entries[0].inode)}
        assert names == {b"sub", *(b"f%d" % number for number in range(10))}
        for name in names:
            assert use.tree.hot_child(entries[0].inode, name) is not None
        assert model.listed == {b"/": 1, b"/d": 1}
        assert model.asked == {b"/": 1}  # start()


async def test_find_over_many_files_costs_one_listing_per_folder(tmp_path: Path, mock_clock: MockClock) -> None:
    model = AlluxioModel(piece=1000)
    for folder in range(100):
        model.mkdir(b"/%d" % folder)
        for number in range(1000):
            model.write(b"/%d/%d" % (folder, number), number)
    async with mounted(tmp_path / "m", model, mock_clock, map_bytes=1 << 30) as use:
        asked_by_start = dict(model.asked)
        files, stack = 0, [ROOT]
        while stack:
            after, inode = 0, stack.pop()
            while page := await use.tree.children(inode, after, 128):
                for entry in page:
                    # find(1) stats what the listing gave; ls -l opens nothing more
                    assert use.tree.hot_child(inode, entry.name) == use.tree.hot(entry.inode) == entry
                    if entry.folder:
                        stack.append(entry.inode)
                    else:
                        files += 1
                after = page[-1].inode
        assert files == 100_000
        assert model.listed == {b"/": 1, **{b"/%d" % folder: 1 for folder in range(100)}}
        assert model.asked == asked_by_start


async def test_lookup_in_an_unlisted_folder_asks_for_the_name_and_lists_behind(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await until(lambda: model.listed.get(b"/") == 1)
        gate = Gate(model, b"/d")
        entry = await use.tree.lookup(folder.inode, b"f3")
        assert entry.length == 3
        assert await use.tree.getattr(entry.inode) == entry
        await until(lambda: gate.waiting == 1)
        assert use.tree.hot_child(folder.inode, b"f3") is None
        gate.open()
        await use.list_all(folder.inode)
        assert use.tree.hot_child(folder.inode, b"f3") == entry
        assert model.listed[b"/d"] == 1
        assert model.asked == {b"/": 1, b"/d": 1, b"/d/f3": 1}


async def test_many_readers_of_one_folder_share_one_listing(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        gate = Gate(model, b"/d")
        lengths: list[int] = []

        async def reader() -> None:
            lengths.append(len(await use.list_all(folder.inode)))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(reader)
            await until(lambda: gate.waiting == 1)
            gate.open()
        assert lengths == [11] * 50
        assert model.listed[b"/d"] == 1


async def test_cancelled_reader_does_not_end_the_listing_others_wait_for(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        gate = Gate(model, b"/d")
        listed: list[int] = []

        async def reader() -> None:
            listed.append(len(await use.list_all(folder.inode)))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as interrupted:

                async def interrupt() -> None:
                    await until(lambda: gate.waiting == 1)
                    interrupted.cancel()

                nursery.start_soon(interrupt)
                await use.tree.children(folder.inode, 0, 5)
            assert interrupted.cancelled_caught
            nursery.start_soon(reader)
            await wait_all_tasks_blocked()
            gate.open()
        assert listed == [11]
        assert model.listed[b"/d"] == 1


async def test_missing_name_in_a_listed_folder_is_told_without_a_call(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode)
        calls = model.calls
        for _ in range(3):
            with pytest.raises(NotFound):
                await use.tree.lookup(folder.inode, b"nothing")
        assert model.calls == calls
        assert use.count("fusecache_metadata_lookups_total{result=negative_hit}") == 3
        assert 0 < use.tree.negative_timeout_s(folder.inode) <= REFRESH_S


async def test_missing_name_in_an_unlisted_folder_is_remembered_for_a_while(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.list_error = PermissionDenied("not yours to list")  # so that it stays unlisted
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        for _ in range(3):
            with pytest.raises(NotFound):
                await use.tree.lookup(folder.inode, b"nothing")
        assert model.asked[b"/d/nothing"] == 1
        assert use.tree.negative_timeout_s(folder.inode) <= 1.0
        model.write(b"/d/nothing", 4)
        mock_clock.jump(20.5)
        assert (await use.tree.lookup(folder.inode, b"nothing")).length == 4


async def test_folder_that_may_not_be_listed_still_answers_look_ups(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.list_error = PermissionDenied("not yours to list")
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/sub/x")
        assert entry.length == 7
        await until(lambda: model.listed.get(b"/d/sub") == 1)
        with pytest.raises(PermissionDenied):
            await use.tree.children(entry.parent, 0, 5)
        listed = dict(model.listed)
        await use.walk(b"/d/sub/x")
        assert model.listed == listed  # refused: not tried again for each request
        model.write(b"/d/sub/x", 8)
        mock_clock.jump(REFRESH_S + 1)
        assert (await use.walk(b"/d/sub/x")).length == 8
        with pytest.raises(StaleId):
            await use.tree.getattr(entry.inode)


# ---- freshness ----


async def test_due_folder_is_listed_again_before_it_is_served(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        old = await use.walk(b"/d/f3")
        await use.list_all(old.parent)
        model.write(b"/d/f3", 4100)
        model.write(b"/d/new", 1)
        model.delete(b"/d/f4")
        assert (await use.walk(b"/d/f3")).length == 3  # within refresh_s: may be old
        mock_clock.jump(REFRESH_S + 1)
        assert use.tree.hot(old.inode) is None
        assert (await use.walk(b"/d/f3")).length == 4100
        assert (await use.walk(b"/d/new")).length == 1
        with pytest.raises(NotFound):
            await use.walk(b"/d/f4")
        with pytest.raises(StaleId):
            await use.tree.getattr(old.inode)
        assert use.tree.superseded(old.inode)
        assert model.listed[b"/d"] == 2


async def test_kernel_may_keep_nothing_past_the_folder_s_time(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        (entry, *_) = await use.list_all(folder.inode)
        listed_at = trio.current_time()
        for waited in (0.0, 10.0, 50.0):
            mock_clock.jump(waited)
            timeout_s = use.tree.kernel_timeout_s(entry)
            assert timeout_s > 0
            assert trio.current_time() + timeout_s <= listed_at + REFRESH_S
        mock_clock.jump(REFRESH_S)
        assert use.tree.kernel_timeout_s(entry) == 0.0


async def test_folder_in_use_is_listed_again_ahead_of_time_and_a_forgotten_one_is_not(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/f3")
        await use.list_all(entry.parent)

        async def pass_seconds(seconds: float, *, used: bool) -> None:
            for _ in range(int(seconds)):
                mock_clock.jump(1.0)
                await wait_all_tasks_blocked()
                await until(lambda: len(loader(use)._listings) == 0)
                if used:
                    assert use.tree.hot(entry.inode) is not None, "a request would have had to wait"

        await pass_seconds(3 * REFRESH_S, used=True)
        assert 3 <= model.listed[b"/d"] - 1 <= 5  # 10 % ahead of up to 20 % early
        listed = model.listed[b"/d"]
        await pass_seconds(3 * REFRESH_S, used=False)
        assert model.listed[b"/d"] <= listed + 1


async def test_immutable_folder_is_listed_once(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    policy = FreshnessPolicy(refresh_s=REFRESH_S, datasets=(DatasetRule(b"/d", immutable=True),))
    async with mounted(tmp_path / "m", model, mock_clock, policy=policy) as use:
        folder = await use.walk(b"/d")
        (entry, *_) = await use.list_all(folder.inode)
        model.write(b"/d/new", 1)
        mock_clock.jump(50 * REFRESH_S)
        await wait_all_tasks_blocked()
        assert len(await use.list_all(folder.inode)) == 11
        assert use.tree.kernel_timeout_s(entry) == policy.immutable_kernel_timeout_s
        assert model.listed[b"/d"] == 1
        diff = await use.tree.refresh(folder.inode, force_sync=False)
        assert diff.added == 1
        assert (await use.walk(b"/d/new")).length == 1


@pytest.mark.parametrize(
    ("age_s", "boot", "lists_again"), [(10, "boot-1", False), (200, "boot-1", True), (10, "boot-2", True)]
)
async def test_after_a_restart_only_a_young_listing_of_this_boot_is_served_at_once(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, age_s: float, boot: str, lists_again: bool
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await use.list_all(ROOT)
        await use.list_all(folder.inode)
    model.write(b"/d/new", 1)
    model.listed.clear()
    mock_clock.jump(age_s)
    async with mounted(tmp_path / "m", model, mock_clock, boot=boot) as use:
        found = {entry.name for entry in await use.list_all((await use.walk(b"/d")).inode)}
        assert (b"new" in found) == lists_again
        assert model.listed == ({b"/": 1, b"/d": 1} if lists_again else {})


async def test_large_due_folder_answers_single_names_while_it_is_listed(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.piece = 5000
    for number in range(PATIENT_ENTRIES):
        model.write(b"/d/many%d" % number, number)
    async with mounted(tmp_path / "m", model, mock_clock, map_bytes=1 << 30) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode, page=5000)
        kept = await use.walk(b"/d/many8")
        model.write(b"/d/many7", 70)
        mock_clock.jump(REFRESH_S + 1)
        gate = Gate(model, b"/d")
        assert (await use.tree.lookup(folder.inode, b"many7")).length == 70
        assert await use.tree.getattr(kept.inode) == kept
        with pytest.raises(NotFound):
            await use.tree.lookup(folder.inode, b"never")
        await until(lambda: gate.waiting == 1)
        gate.open()
        assert len(await use.list_all(folder.inode, page=5000)) == PATIENT_ENTRIES + 11
        assert (await use.tree.lookup(folder.inode, b"many7")).length == 70


# ---- nobody answers ----


async def test_without_a_master_the_known_is_served_and_counted_up_to_its_limit(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/f3")
        await use.list_all(entry.parent)
        model.error = Unavailable("no master answers")
        mock_clock.jump(REFRESH_S + 1)
        calls = model.calls
        assert (await use.walk(b"/d/f3")).length == 3
        assert len(await use.list_all(entry.parent)) == 11
        assert await use.tree.getattr(entry.inode) == entry
        with pytest.raises(NotFound):
            await use.tree.lookup(entry.parent, b"nothing")
        assert model.calls > calls  # the fault happened
        assert use.count("fusecache_metadata_lookups_total{result=stale}") >= 4
        assert 0 < use.tree.kernel_timeout_s(entry) <= 1.0
        mock_clock.jump(1000.0)  # stale_if_error_s
        with pytest.raises(Unavailable):
            await use.tree.children(entry.parent, 0, 5)
        with pytest.raises(Unavailable):
            await use.tree.getattr(entry.inode)
        with pytest.raises(Unavailable):
            await use.tree.getattr(ROOT)


async def test_without_a_master_at_most_one_attempt_a_second_is_made(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/f3")
        await use.list_all(ROOT)
        await use.list_all(entry.parent)
        model.error = Unavailable("no master answers")
        mock_clock.jump(REFRESH_S + 1)
        await use.walk(b"/d/f3")
        await wait_all_tasks_blocked()
        calls, seconds = model.calls, 20
        for _ in range(seconds * 10):
            for _ in range(5):
                await use.walk(b"/d/f3")
            await until(lambda: len(loader(use)._listings) == 0)
            mock_clock.jump(0.1)
        assert 0 < model.calls - calls <= seconds + 1


async def test_with_a_master_again_the_fresh_is_served(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/f3")
        await use.list_all(entry.parent)
        model.error = Unavailable("no master answers")
        mock_clock.jump(REFRESH_S + 1)
        assert (await use.walk(b"/d/f3")).length == 3
        await until(lambda: len(loader(use)._listings) == 0)
        model.write(b"/d/f3", 4100)
        model.error = None
        mock_clock.jump(2.1)
        await until(lambda: not use.tree._known.outage)  # found out in the background
        assert (await use.walk(b"/d/f3")).length == 4100


async def test_a_master_that_hangs_makes_readers_wait_seconds_not_the_whole_budget(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        entry = await use.walk(b"/d/f3")
        await use.list_all(entry.parent)
        mock_clock.jump(REFRESH_S * 0.5)
        await use.list_all(entry.parent)
        mock_clock.jump(REFRESH_S * 0.5 + 1)
        gate = Gate(model, None)
        served: list[int] = []

        async def reader() -> None:
            served.append(len(await use.tree.children(entry.parent, 0, 50)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await until(lambda: gate.waiting >= 1)
            await wait_all_tasks_blocked()
            assert served == []
            mock_clock.jump(5.1)
            await until(lambda: served == [11])
            await reader()  # the next ones don't wait at all
            gate.open()
        assert served == [11, 11]


async def test_unknown_folder_without_a_master_is_unavailable(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await use.list_all(ROOT)
        await until(lambda: len(loader(use)._listings) == 0)
        model.error = Unavailable("no master answers")
        with pytest.raises(Unavailable):
            await use.list_all(folder.inode)


# ---- listings that break, are hostile, or do not fit ----


@pytest.mark.parametrize("chunk", [2, 8192])
@pytest.mark.parametrize("broken_after", [0, 1, 5, 11])
async def test_listing_that_breaks_off_leaves_the_old_one(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, broken_after: int, chunk: int
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock, chunk=chunk) as use:
        folder = await use.walk(b"/d")
        old = await use.list_all(folder.inode)
        use.changes.clear()
        for number in range(12):
            model.write(b"/d/f%d" % number, 1000)
        model.list_error, model.break_after = Unavailable("the stream broke"), broken_after
        mock_clock.jump(REFRESH_S + 1)
        assert await use.list_all(folder.inode) == old
        assert use.count("fusecache_metadata_refreshes_total{result=failed}") >= 1
        assert use.changes == []
        model.list_error = None
        diff = await use.tree.refresh(folder.inode, force_sync=False)
        assert (diff.replaced, diff.added) == (10, 2)


async def test_first_listing_that_breaks_off_is_an_error_not_a_partial_folder(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock, chunk=2) as use:
        folder = await use.walk(b"/d")
        await until(lambda: len(loader(use)._listings) == 0)
        model.list_error, model.break_after = Unavailable("the stream broke"), 5
        with pytest.raises(Unavailable):
            await use.tree.children(folder.inode, 0, 50)
        model.list_error = None
        assert len(await use.list_all(folder.inode)) == 11


def hostile(path: bytes, **fields: object) -> FileStatus:
    status = FileStatus(
        99, b"x", path, False, True, True, False, False, 5, 10, 1, (), 0, 0o644, b"o", b"g", 1, b""
    )  # fmt: skip
    return status._replace(**fields)  # type: ignore[arg-type]


async def test_impossible_entries_are_skipped_and_counted(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await until(lambda: len(loader(use)._listings) == 0)
        bad = [
            hostile(b"/d/" + b"n" * 300, name=b"n" * 300),
            hostile(b"/d/", name=b""),
            hostile(b"/d/root", name=b"root", file_id=0),
            hostile(b"/d/self", name=b"self", file_id=folder.inode - 1, folder=True),
            hostile(b"/d/huge", name=b"huge", length=1 << 64),
            hostile(b"/d/negative", name=b"negative", length=-1),
            hostile(b"/d/owner", name=b"owner", owner=b"o" * 300),
        ]
        loader(use)._list_folder = lambda path, sync_ms: iter([bad, [hostile(b"/d/good", name=b"good")]])
        assert [entry.name for entry in await use.list_all(folder.inode)] == [b"good"]
        assert use.count("fusecache_upstream_rejected_total{what=listing_entry}") == len(bad)


async def test_impossible_answer_about_one_name_is_a_protocol_error(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.list_error = PermissionDenied("stays unlisted")
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        loader(use)._get_status = lambda path, sync_ms: hostile(path, file_id=folder.inode - 1)
        with pytest.raises(ProtocolError):
            await use.tree.lookup(folder.inode, b"x")


async def test_folders_that_contain_each_other_do_not_hang(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        sub = await use.walk(b"/d/sub")
        await use.list_all(ROOT)
        await use.list_all(folder.inode)
        inner = hostile(b"/d/sub/d", name=b"d", file_id=folder.inode - 1, folder=True, ufs_path=b"s3://bucket/d/sub/d")
        answers = {b"/d/sub": [inner]}
        honest = loader(use)._list_folder
        loader(use)._list_folder = lambda path, sync_ms: iter(
            [answers[path]] if path in answers else honest(path, sync_ms)
        )
        await use.tree.refresh(sub.inode, force_sync=False)
        for call in (use.tree.path, use.tree.ufs_path):
            with pytest.raises(StaleId):
                call(folder.inode)
        with pytest.raises(StaleId):
            await use.tree.refresh(folder.inode, force_sync=False)
        # Whoever lists the folder that really has it puts it right again.
        await use.tree.refresh(ROOT, force_sync=False)
        assert use.tree.path(folder.inode) == b"/d"


async def test_full_store_is_emptied_and_goes_on(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, expected_logs: Declare
) -> None:
    expected_logs("metadata store is full")
    for folder in range(12):
        model.mkdir(b"/big%d" % folder)
        for number in range(1500):
            model.write(b"/big%d/%0100d" % (folder, number), number)
    async with mounted(tmp_path / "m", model, mock_clock, map_bytes=4 << 20, chunk=500) as use:
        for folder in range(12):
            for _ in range(5):
                try:
                    entries = await use.list_all((await use.walk(b"/big%d" % folder)).inode, page=500)
                except StaleId:
                    continue  # the store was emptied under it: the kernel walks down again
                assert len(entries) == 1500
                break
            else:
                raise AssertionError("never listed")
        assert (await use.walk(b"/d/f3")).length == 3


async def test_folder_that_does_not_fit_the_store_is_an_error_and_its_names_still_answer(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, expected_logs: Declare
) -> None:
    expected_logs("metadata store is full")
    model.mkdir(b"/big")
    for number in range(12_000):
        model.write(b"/big/%0150d" % number, number)
    async with mounted(tmp_path / "m", model, mock_clock, map_bytes=2 << 20, chunk=500) as use:
        big = await use.walk(b"/big")
        with pytest.raises(StateError):
            await use.list_all(big.inode)
        assert model.listed[b"/big"] == 2  # with what the store held, and again with the store to itself
        # Its names must not make it be listed again behind them: that would empty the store under everybody else.
        for number in range(7):
            assert (await use.walk(b"/big/%0150d" % number)).length == number
        assert len(await use.list_all((await use.walk(b"/d")).inode)) == 11
        await wait_all_tasks_blocked(0.05)
        assert model.listed[b"/big"] == 2


# ---- incomplete files ----


async def test_incomplete_file_is_listed_asked_again_and_never_stored(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    node = model.write(b"/d/growing", 0, completed=False)
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        listed = {entry.name: entry for entry in await use.list_all(folder.inode)}
        growing = listed[b"growing"]
        assert not growing.completed
        assert use.tree.kernel_timeout_s(growing) == 0.0
        with use.store.read() as txn:
            assert use.store.entry(txn, growing.inode) is None
        assert use.tree.hot(growing.inode) is use.tree.hot_child(folder.inode, b"growing") is None
        for _ in range(10):
            await use.tree.getattr(growing.inode)
        assert model.asked.get(b"/d/growing", 0) == 0  # the listing is not a second old
        mock_clock.jump(1.1)
        for _ in range(10):
            assert not (await use.tree.lookup(folder.inode, b"growing")).completed
        assert model.asked[b"/d/growing"] == 1
        node.completed, node.length = True, 110
        mock_clock.jump(1.1)
        done = await use.tree.getattr(growing.inode)
        assert (done.completed, done.length) == (True, 110)
        assert use.tree.kernel_timeout_s(done) > 0
        await until(lambda: Change("attributes", folder.inode, b"growing", growing.inode) in use.changes)
        assert done in await use.list_all(folder.inode)
        # A name that is really missing is still told without a call.
        calls = model.calls
        with pytest.raises(NotFound):
            await use.tree.lookup(folder.inode, b"nothing")
        assert model.calls == calls


async def test_incomplete_file_that_was_given_up_is_gone(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.write(b"/d/growing", 0, completed=False)
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        growing = {entry.name: entry for entry in await use.list_all(folder.inode)}[b"growing"]
        model.delete(b"/d/growing")
        mock_clock.jump(1.1)
        with pytest.raises(StaleId):
            await use.tree.getattr(growing.inode)
        with pytest.raises(NotFound):
            await use.tree.lookup(folder.inode, b"growing")


async def test_incomplete_file_after_a_restart_is_listed_again(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    model.write(b"/d/growing", 0, completed=False)
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        await use.list_all((await use.walk(b"/d")).inode)
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        names = {entry.name for entry in await use.list_all((await use.walk(b"/d")).inode)}
        assert b"growing" in names


# ---- changes are pushed ----


async def test_changes_of_a_folder_are_pushed_with_the_folder_itself(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        inodes = {entry.name: entry.inode for entry in await use.list_all(folder.inode)}
        assert use.changes == []  # a first listing is news to nobody
        model.write(b"/d/f0", 1)
        model.delete(b"/d/f1")
        added = model.write(b"/d/new", 1)
        model.node(b"/d/f2").mode = 0o600
        diff = await use.tree.refresh(folder.inode, force_sync=True)
        assert model.sync_intervals[-1] == 0
        assert set(use.changes) == {
            Change("replaced", folder.inode, b"f0", inodes[b"f0"]),
            Change("removed", folder.inode, b"f1", inodes[b"f1"]),
            Change("added", folder.inode, b"new", added.file_id + 1),
            Change("attributes", folder.inode, b"f2", inodes[b"f2"]),
            Change("folder", ROOT, b"d", folder.inode),
        }
        assert (diff.replaced, diff.removed, diff.added, diff.attributes) == (1, 1, 1, 1)


async def test_name_found_missing_before_the_first_listing_is_pushed_when_it_is_there(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await until(lambda: len(loader(use)._listings) == 0)
        gate = Gate(model, b"/d")
        with pytest.raises(NotFound):
            await use.tree.lookup(folder.inode, b"soon")
        node = model.write(b"/d/soon", 1)
        gate.open()
        await use.list_all(folder.inode)
        await until(lambda: Change("added", folder.inode, b"soon", node.file_id + 1) in use.changes)


async def test_change_that_the_receiver_fails_on_does_not_lose_the_others(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, expected_logs: Declare
) -> None:
    expected_logs("could not be delivered")

    def receiver(change: Change) -> None:
        if change.name == b"f0":
            raise OSError("the kernel says no")

    async with mounted(tmp_path / "m", model, mock_clock, on_change=receiver) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode)
        for number in range(3):
            model.delete(b"/d/f%d" % number)
        await use.tree.refresh(folder.inode, force_sync=False)
        assert {change.name for change in use.changes if change.kind == "removed"} == {b"f0", b"f1", b"f2"}


async def test_receiver_that_blocks_holds_up_no_request(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    # A kernel notification blocks while a LOOKUP in that folder is being answered.
    blocked, release = threading.Event(), threading.Event()

    def receiver(change: Change) -> None:
        blocked.set()
        assert release.wait(20)

    async with mounted(tmp_path / "m", model, mock_clock, on_change=receiver) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode)
        model.delete(b"/d/f1")
        mock_clock.jump(REFRESH_S + 1)
        with pytest.raises(NotFound):
            await use.walk(b"/d/f1")
        await until(blocked.is_set)
        assert (await use.walk(b"/d/f2")).length == 2
        release.set()


@pytest.mark.parametrize("earlier", ["listing", "refresh"])
async def test_refresh_does_not_join_a_listing_that_began_before_it(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, earlier: str
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode)
        held, go = threading.Event(), threading.Event()

        def hold(path: bytes) -> None:
            if not held.is_set():
                held.set()
                assert go.wait(20)

        model.after_answer = hold  # the old listing is read, not yet handed over
        async with trio.open_nursery() as nursery:
            diffs = []

            async def refresh() -> None:
                diffs.append(await use.tree.refresh(folder.inode, force_sync=True))

            if earlier == "listing":
                mock_clock.jump(REFRESH_S + 1)
                nursery.start_soon(use.tree.children, folder.inode, 0, 5)
            else:
                nursery.start_soon(refresh)
            await until(held.is_set)
            model.write(b"/d/new", 1)
            nursery.start_soon(refresh)
            nursery.start_soon(refresh)
            await wait_all_tasks_blocked()
            go.set()
        assert [diff.added for diff in diffs] == ([1, 1] if earlier == "listing" else [0, 1, 1])
        assert (await use.walk(b"/d/new")).length == 1


# ---- the mounted folder, paths ----


async def test_mounted_folder_replaced_by_another_goes_on(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock, root_path=b"/d") as use:
        assert (await use.walk(b"/sub/x")).length == 7
        await use.list_all(ROOT)
        model.delete(b"/d")
        model.mkdir(b"/d").mode = 0o700
        model.write(b"/d/y", 9)
        mock_clock.jump(REFRESH_S + 1)
        assert [entry.name for entry in await use.list_all(ROOT)] == [b"y"]
        assert (await use.tree.getattr(ROOT)).mode == 0o700
        assert (await use.walk(b"/y")).length == 9
        with pytest.raises(NotFound):
            await use.walk(b"/sub")


async def test_mounted_folder_that_is_gone_is_not_found_until_it_is_back(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock, root_path=b"/d/sub") as use:
        await use.list_all(ROOT)
        model.delete(b"/d/sub")
        mock_clock.jump(REFRESH_S + 1)
        with pytest.raises(NotFound):
            await use.tree.getattr(ROOT)
        with pytest.raises(NotFound):
            await use.list_all(ROOT)
        model.mkdir(b"/d/sub")
        model.write(b"/d/sub/z", 3)
        assert (await use.walk(b"/z")).length == 3


async def test_mounting_what_is_missing_or_a_file(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    with pytest.RaisesGroup(NotFound):
        async with mounted(tmp_path / "m", model, mock_clock, root_path=b"/nowhere"):
            raise AssertionError("start() must fail")
    async with mounted(tmp_path / "m", model, mock_clock, root_path=b"/d/f3") as use:
        assert not use.tree.root.folder


@pytest.mark.parametrize("root_path", [b"/", b"/d"])
async def test_paths_are_rebuilt_from_names(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock, root_path: bytes
) -> None:
    model.write(b"/d/sub/\xff\xfe?%2F \\", 1)
    async with mounted(tmp_path / "m", model, mock_clock, root_path=root_path) as use:
        entry = await use.walk(b"/d/sub/\xff\xfe?%2F \\".removeprefix(root_path if root_path != b"/" else b""))
        for _ in range(2):
            assert use.tree.path(entry.inode) == b"/d/sub/\xff\xfe?%2F \\"
            assert use.tree.ufs_path(entry.inode) == b"s3://bucket/d/sub/\xff\xfe?%2F \\"
            await use.list_all(entry.parent)
        assert use.tree.path(ROOT) == root_path
        assert use.tree.ufs_path(ROOT) == b"s3://bucket" + root_path.rstrip(b"/")
        with pytest.raises(StaleId):
            use.tree.path(12345)


async def test_inode_nobody_knows_is_stale(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        for call in (use.tree.getattr(777), use.tree.lookup(777, b"a"), use.tree.children(777, 0, 5)):
            with pytest.raises(StaleId):
                await call
        assert use.tree.hot(777) is None
        assert use.tree.hot_child(777, b"a") is None
        assert use.tree.superseded(777)
        assert model.calls == 1


async def test_replaced_folder_is_dead_with_everything_in_it(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        sub, old = await use.walk(b"/d/sub"), await use.walk(b"/d/sub/x")
        await use.list_all(sub.parent)
        await use.list_all(sub.inode)
        model.delete(b"/d/sub")
        model.mkdir(b"/d/sub")
        model.write(b"/d/sub/x", 8)
        await use.tree.refresh(sub.parent, force_sync=False)
        for dead in (sub.inode, old.inode):
            assert use.tree.superseded(dead)
            assert use.tree.hot(dead) is None
            with pytest.raises(StaleId):
                await use.tree.getattr(dead)
        assert use.tree.hot_child(sub.inode, b"x") is None
        with pytest.raises(StaleId):
            await use.tree.lookup(sub.inode, b"x")
        assert (await use.walk(b"/d/sub/x")).length == 8


async def test_renamed_folder_keeps_its_inode(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        sub = await use.walk(b"/d/sub")
        await use.list_all(sub.parent)
        model.rename(b"/d/sub", b"/d/renamed")
        await use.tree.refresh(sub.parent, force_sync=False)
        assert (await use.walk(b"/d/renamed")).inode == sub.inode
        assert use.tree.path(sub.inode) == b"/d/renamed"
        assert (await use.walk(b"/d/renamed/x")).length == 7


async def test_hot_entries_are_bounded(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    async with mounted(tmp_path / "m", model, mock_clock, hot_entries=4) as use:
        folder = await use.walk(b"/d")
        entries = await use.list_all(folder.inode)
        for _ in range(2):
            for entry in entries:
                assert use.tree.hot_child(folder.inode, entry.name) == entry
                assert use.tree.hot(entry.inode) == entry
        assert 2 <= len(use.tree._known._hot) <= 4


async def test_tree_before_run_says_so(tmp_path: Path, model: AlluxioModel, mock_clock: MockClock) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        pass
    use.tree._loader = None
    with pytest.raises(RuntimeError, match="not running"):
        await use.tree.start()


async def test_shut_down_during_a_listing_ends_soon_and_leaves_nothing_of_it(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async def stop(use: Mounted) -> None:
        folder = await use.walk(b"/d")
        await until(lambda: len(loader(use)._listings) == 0)
        gate = Gate(model, b"/d")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_cancelled, use, folder.inode)
            await until(lambda: gate.waiting == 1)
            nursery.cancel_scope.cancel()
        gate.open()

    async with mounted(tmp_path / "m", model, mock_clock) as use:
        await stop(use)
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        assert len(await use.list_all((await use.walk(b"/d")).inode)) == 11


async def _expect_cancelled(use: Mounted, inode: int) -> None:
    await use.tree.children(inode, 0, 5)


async def test_new_file_that_is_still_written_is_pushed_as_added_once(
    tmp_path: Path, model: AlluxioModel, mock_clock: MockClock
) -> None:
    async with mounted(tmp_path / "m", model, mock_clock) as use:
        folder = await use.walk(b"/d")
        await use.list_all(folder.inode)
        with pytest.raises(NotFound):  # which the kernel may keep
            await use.tree.lookup(folder.inode, b"growing")
        assert use.tree.negative_timeout_s(folder.inode) > 0
        node = model.write(b"/d/growing", 1, completed=False)
        for _ in range(2):
            mock_clock.jump(1.0)
            await use.tree.refresh(folder.inode, force_sync=True)
            changes = [change for change in use.changes if change.name == b"growing"]
            assert changes == [Change("added", folder.inode, b"growing", node.file_id + 1)]
