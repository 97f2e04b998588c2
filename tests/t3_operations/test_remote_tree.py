"""A worker's view of the tree: what it answers itself, what it asks, and what happens when the agent goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache.cache.freshness import DatasetRule, FreshnessPolicy
from fusecache.cache.transaction import Transaction
from fusecache.cache.tree import ROOT
from fusecache.errors import FusecacheError, NotFound, PermissionDenied, StaleId, Unavailable
from tests.support.log_noise import Declare
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t3_operations.remote_rig import REFRESH_S, SameProcessStore, shared_mount

FILES = 11


@pytest.fixture
def model() -> AlluxioModel:
    """/d with eleven files, of which nobody has listed anything."""
    model = AlluxioModel()
    model.mkdir(b"/d")
    for number in range(FILES):
        model.write(b"/d/f%02d" % number, number)
    return model


async def until(condition: Callable[[], bool]) -> None:
    """Threads work meanwhile."""
    with trio.fail_after(60):  # of the mock clock, which stands still: the test's own timeout ends a wait in vain
        while not condition():
            await trio.to_thread.run_sync(lambda: None)


async def test_file_of_a_folder_not_listed_yet_is_asked_for_and_has_its_paths(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.list_error = Unavailable("no listings")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            found = await worker.walk(b"/d/f05")
            assert (found.inode, found.length) == (model.node(b"/d/f05").file_id + 1, 5)
            assert worker.tree.hot(found.inode) is None
            assert await worker.tree.getattr(found.inode) == found
            assert worker.tree.path(found.inode) == b"/d/f05"
            assert worker.tree.ufs_path(found.inode) == b"s3://bucket/d/f05"
            assert not worker.tree.superseded(found.inode)
            assert worker.tree.kernel_timeout_s(found) == mount.tree.kernel_timeout_s(found) > 0


async def test_worker_that_never_looked_a_file_up_has_its_path_by_getattr(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.list_error = Unavailable("no listings")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker(0) as first, mount.worker(1) as second:
            found = await first.walk(b"/d/f05")
            with pytest.raises(StaleId):
                second.tree.path(found.inode)
            assert await second.tree.getattr(found.inode) == found
            assert second.tree.path(found.inode) == b"/d/f05"


async def test_listed_folder_is_answered_without_the_agent(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker:
            folder = await worker.walk(b"/d")
            assert len(await worker.list_all(ROOT)) == 1  # /d itself is then in the store
            entries = await worker.list_all(folder.inode)
            assert len(entries) == FILES
            questions = agent.service.workers()[0].questions
            assert questions > 0
            for entry in entries:
                assert worker.tree.hot_child(folder.inode, entry.name) == entry
                assert worker.tree.hot(entry.inode) == entry
                assert worker.tree.kernel_timeout_s(entry) == mount.tree.kernel_timeout_s(entry) > 0
            assert await worker.list_all(folder.inode) == entries
            with pytest.raises(NotFound):
                await worker.tree.lookup(folder.inode, b"missing")
            assert worker.tree.negative_timeout_s(folder.inode) == mount.tree.negative_timeout_s(folder.inode) > 0
            assert agent.service.workers()[0].questions == questions


async def test_new_listing_reaches_every_worker_with_the_epoch(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker(0) as first, mount.worker(1) as second:
            folder = await first.walk(b"/d")
            await first.list_all(ROOT)
            await first.list_all(folder.inode)
            before = [worker.tree.hot_child(folder.inode, b"f03") for worker in (first, second)]
            assert None not in before
            model.write(b"/d/f03", 77)
            assert [worker.tree.hot_child(folder.inode, b"f03") for worker in (first, second)] == before
            mock_clock.jump(1.0)  # no two listings are asked for at one moment
            await mount.tree.refresh(folder.inode, force_sync=True)
            for worker, old in zip((first, second), before, strict=True):
                found = worker.tree.hot_child(folder.inode, b"f03")
                assert found is not None
                assert found.length == 77
                assert old is not None
                assert worker.tree.hot(old.inode) is None
                assert worker.tree.superseded(old.inode)
                assert not worker.tree.superseded(found.inode)


async def test_epoch_of_another_folder_keeps_what_is_hot(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.mkdir(b"/other")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker:
            folder, other = await worker.walk(b"/d"), await worker.walk(b"/other")
            for inode in (ROOT, folder.inode, other.inode):
                await worker.list_all(inode)
            hot = worker.tree.hot_child(folder.inode, b"f03")
            epoch = agent.board.epoch[0]
            await mount.tree.refresh(other.inode, force_sync=True)
            assert agent.board.epoch[0] > epoch
            assert worker.tree.hot_child(folder.inode, b"f03") is hot


async def test_due_folder_is_asked_for_and_comes_back_fresh(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    policy = FreshnessPolicy(refresh_s=REFRESH_S, refresh_calls_per_s=0.0)
    with shared_mount(tmp_path, model, mock_clock, policy=policy) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            folder = await worker.walk(b"/d")
            await worker.list_all(ROOT)
            await worker.list_all(folder.inode)
            model.write(b"/d/f03", 77)
            mock_clock.jump(REFRESH_S + 1)
            assert worker.tree.hot_child(folder.inode, b"f03") is None
            assert worker.tree.listing_of(folder.inode) is not None
            assert (await worker.tree.lookup(folder.inode, b"f03")).length == 77
            assert worker.tree.hot_child(folder.inode, b"f03") is not None


async def test_incomplete_file_is_listed_and_found_as_long_as_it_is_one(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    node = model.write(b"/d/growing", 1, completed=False)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker(0) as first, mount.worker(1) as second:
            folder = await first.walk(b"/d")
            await first.list_all(ROOT)
            for worker in (first, second):
                entries = await worker.list_all(folder.inode)
                assert len(entries) == FILES + 1
                (growing,) = [entry for entry in entries if entry.name == b"growing"]
                assert not growing.completed
                assert worker.tree.kernel_timeout_s(growing) == 0.0
                assert not worker.tree.superseded(growing.inode)
                # The others are complete, and need nobody.
                assert worker.tree.hot_child(folder.inode, b"f00") is not None
                assert worker.tree.hot_child(folder.inode, b"growing") is None
            node.completed, node.length = True, 2
            mock_clock.jump(2.0)
            for worker in (first, second):
                assert (await worker.tree.lookup(folder.inode, b"growing")).length == 2


async def test_name_asked_for_after_a_listing_beats_the_listing_in_every_worker(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusecache.cache.tree.PATIENT_ENTRIES", 5)
    policy = FreshnessPolicy(refresh_s=REFRESH_S, refresh_calls_per_s=0.0)
    with shared_mount(tmp_path, model, mock_clock, policy=policy) as mount:
        async with mount.living_agent() as agent, mount.worker(0) as first, mount.worker(1) as second:
            folder = await first.walk(b"/d")
            await first.list_all(ROOT)
            await first.list_all(folder.inode)
            mock_clock.jump(REFRESH_S + 1)
            # A listing that is read now, and arrives after a single name was asked for.
            may_end = trio.Event()
            token = trio.lowlevel.current_trio_token()
            model.after_answer = lambda path: trio.from_thread.run(may_end.wait, trio_token=token)
            changed = model.write(b"/d/f03", 77)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(agent.tree.children, folder.inode, 0, 1)
                await until(lambda: model.listed[b"/d"] == 2)
                mock_clock.jump(1.0)
                changed = model.write(b"/d/f03", 78)
                assert (await first.tree.lookup(folder.inode, b"f03")).inode == changed.file_id + 1
                may_end.set()
            model.after_answer = None
            for worker in (first, second):
                assert worker.tree.hot_child(folder.inode, b"f04") is not None
                assert worker.tree.hot_child(folder.inode, b"f03") is None
                assert (await worker.tree.lookup(folder.inode, b"f03")).length == 78
                listed = {entry.name: entry.length for entry in await worker.list_all(folder.inode)}
                assert listed[b"f03"] == 78
                assert len(listed) == FILES


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Unavailable("no master answers"), Unavailable),
        (PermissionDenied("not for you"), PermissionDenied),
        (NotFound("no such file"), NotFound),
    ],
)
async def test_errors_travel_as_themselves(
    tmp_path: Path,
    mock_clock: MockClock,
    model: AlluxioModel,
    error: FusecacheError,
    raised: type[FusecacheError],
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            folder = await worker.walk(b"/d")
            model.error = error
            with pytest.raises(raised, match=str(error)):
                await worker.tree.lookup(folder.inode, b"nobody asked for this yet")


async def test_dead_inode_is_stale(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            for ask in (
                worker.tree.getattr(999),
                worker.tree.lookup(999, b"a"),
                worker.tree.children(999, 0, 10),
            ):
                with pytest.raises(StaleId):
                    await ask
            assert worker.tree.superseded(999)


async def test_missing_name_of_a_folder_not_listed_may_be_kept_for_a_moment(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.list_error = Unavailable("no listings")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            folder = await worker.walk(b"/d")
            with pytest.raises(NotFound):
                await worker.tree.lookup(folder.inode, b"missing")
            assert worker.tree.negative_timeout_s(folder.inode) == 1.0


# ---- the agent goes away ----


async def test_without_an_agent_what_is_fresh_is_answered_and_the_rest_waits_for_the_next_one(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent() as agent:
                folder = await worker.walk(b"/d")
                await worker.list_all(ROOT)
                entries = await worker.list_all(folder.inode)
                await agent.settled()
            model.mkdir(b"/new")
            assert worker.tree.hot(ROOT) is not None
            for entry in entries:
                assert worker.tree.hot_child(folder.inode, entry.name) == entry
                assert not worker.tree.superseded(entry.inode)
                assert worker.tree.path(entry.inode) == b"/d/" + entry.name
            assert await worker.list_all(folder.inode) == entries
            with pytest.raises(NotFound):
                await worker.tree.lookup(folder.inode, b"missing")

            mock_clock.jump(REFRESH_S + 1)  # now nothing is fresh
            calls = model.calls
            found = []
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    found.append(await worker.tree.lookup(folder.inode, b"f03"))

                nursery.start_soon(look)
                await wait_all_tasks_blocked(0.01)
                assert found == []
                assert model.calls == calls
                async with mount.living_agent():
                    await until(lambda: found != [])
            assert found[0].name == b"f03"


async def test_questions_of_a_killed_agent_are_asked_again(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            release = threading.Event()
            found = []

            async def look(folder: int) -> None:
                found.append(await worker.tree.lookup(folder, b"f03"))

            async with trio.open_nursery() as nursery:
                async with mount.living_agent():
                    folder = await worker.walk(b"/d")
                    asked = model.asked.get(b"/d/f03", 0)
                    model.before_answer = lambda path: release.wait(30) and None
                    nursery.start_soon(look, folder.inode)
                    await until(lambda: mount.tree._running()._questions.__len__() == 1)
                    # The question has reached the agent, and has no answer; the thread that asks is left behind.
                    release_soon = threading.Timer(0.2, release.set)
                    release_soon.start()
                release_soon.join()
                model.before_answer = None
                assert found == []
                async with mount.living_agent():
                    await until(lambda: found != [])
            assert found[0].name == b"f03"
            assert model.asked[b"/d/f03"] > asked


async def test_new_agent_is_led_to_a_file_that_only_the_old_one_knew(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.mkdir(b"/d/e")
    model.write(b"/d/e/deep", 9)
    model.list_error = Unavailable("no listings")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent():
                found = await worker.walk(b"/d/e/deep")
            assert not worker.tree.superseded(found.inode)
            assert worker.tree.path(found.inode) == b"/d/e/deep"
            async with mount.living_agent() as agent:
                with pytest.raises(StaleId):
                    await agent.tree.getattr(found.inode)
                assert await worker.tree.getattr(found.inode) == found
                replaced = await worker.walk(b"/d")
                model.write(b"/d/f03", 77)
                mock_clock.jump(REFRESH_S + 1)
                model.list_error = None
                await mount.tree.refresh(replaced.inode, force_sync=True)


async def test_file_replaced_while_there_was_no_agent_is_stale_for_the_next_one(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    model.list_error = Unavailable("no listings")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent():
                found = await worker.walk(b"/d/f03")
            model.write(b"/d/f03", 77)
            async with mount.living_agent():
                with pytest.raises(StaleId):
                    await worker.tree.getattr(found.inode)
                assert (await worker.walk(b"/d/f03")).length == 77
                model.list_error = None
                await worker.list_all((await worker.walk(b"/d")).inode)
                assert worker.tree.superseded(found.inode)


async def test_absent_agent_fails_a_request_only_when_its_budget_is_over(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock, budget_s=20.0) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent():
                folder = await worker.walk(b"/d")
            outcome: list[str] = []
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    with pytest.raises(Unavailable, match="within 20 s"):
                        await worker.tree.lookup(folder.inode, b"f03")
                    outcome.append("unavailable")

                nursery.start_soon(look)
                await wait_all_tasks_blocked(0.01)
                mock_clock.jump(19.9)
                await wait_all_tasks_blocked(0.01)
                assert outcome == []
                mock_clock.jump(0.2)
            assert outcome == ["unavailable"]


async def test_agent_with_another_store_is_followed(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent():
                folder = await worker.walk(b"/d")
                await worker.list_all(ROOT)
                await worker.list_all(folder.inode)
                old = worker.tree.hot_child(folder.inode, b"f03")
                assert old is not None
            # The cluster was formatted: equal ids mean other files from now on.
            mount.cluster = "cluster-2"
            model.root.children.clear()
            other = AlluxioModel()
            other.mkdir(b"/x")
            other.write(b"/x/f03", 1)
            model.root = other.root
            async with mount.living_agent():
                assert worker.tree.hot_child(folder.inode, b"f03") is None
                assert worker.tree.hot(old.inode) is None
                fresh = await worker.walk(b"/x")
                assert len(await worker.list_all(fresh.inode)) == 1
                with pytest.raises(NotFound):
                    await worker.walk(b"/d")


async def test_store_that_was_emptied_shows_nothing_old(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker:
            folder = await worker.walk(b"/d")
            await worker.list_all(ROOT)
            before = await worker.list_all(folder.inode)
            model.write(b"/d/f03", 77)
            await trio.to_thread.run_sync(agent.store.writer.run, agent.store.reset)
            agent.tree._known.forget_everything()
            assert worker.tree.hot_child(folder.inode, b"f03") is None
            again = await worker.walk(b"/d/f03")
            assert again.length == 77
            assert len(await worker.list_all(folder.inode)) == len(before)


async def test_worker_that_can_not_read_the_store_asks_for_everything_and_tries_again(
    tmp_path: Path,
    mock_clock: MockClock,
    model: AlluxioModel,
    monkeypatch: pytest.MonkeyPatch,
    expected_logs: Declare,
) -> None:
    expected_logs("the metadata store can't be read; the agent is asked instead")
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent:
            await agent.tree.children(ROOT, 0, 10)
            await agent.tree.children((await agent.tree.lookup(ROOT, b"d")).inode, 0, 10)

            def refused(store: SameProcessStore, path: Path, map_bytes: int) -> lmdb.Environment:
                raise lmdb.ReadersFullError("no slot")

            with monkeypatch.context() as patch:
                patch.setattr(SameProcessStore, "_open", refused)
                async with mount.worker() as worker:
                    found = await worker.walk(b"/d/f03")
                    assert found.length == 3
                    assert worker.tree.hot(found.inode) is None
                    assert len(await worker.list_all(found.parent)) == FILES
                    with pytest.raises(NotFound):
                        await worker.tree.lookup(found.parent, b"missing")
                    # The folders above came with the answer.
                    assert worker.tree.path(found.inode) == b"/d/f03"
                    assert worker.tree.ufs_path(found.inode) == b"s3://bucket/d/f03"
                    assert not worker.tree.superseded(found.inode)
                    patch.undo()
                    mock_clock.jump(1.1)
                    assert worker.tree.hot(found.inode) == found


async def test_store_that_stops_being_readable_is_asked_for_instead(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, expected_logs: Declare
) -> None:
    expected_logs("the metadata store can't be read; the agent is asked instead", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            folder = await worker.walk(b"/d")
            await worker.list_all(ROOT)
            await worker.list_all(folder.inode)
            assert worker.tree.hot_child(folder.inode, b"f03") is not None

            def torn() -> Transaction:
                raise lmdb.CorruptedError("page")

            worker.tree._known._shared.read = torn
            assert worker.tree.hot_child(folder.inode, b"f04") is None
            assert (await worker.tree.lookup(folder.inode, b"f04")).length == 4
            assert len(await worker.list_all(folder.inode)) == FILES
            mock_clock.jump(1.1)
            assert worker.tree.hot_child(folder.inode, b"f04") is not None


# ---- messages besides look-ups ----


async def test_stale_read_is_healed_and_listing_again_is_asked_for(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.worker() as worker:
            async with mount.living_agent() as agent:
                await worker.tree.heal_stale(77)
                assert agent.healed == [77]
                worker.tree.list_again(78)
                await until(lambda: agent.listed_again == [78])
                assert await worker.tree.ask("echo", text="hello") == {"said": "hello"}
            await until(lambda: not worker.tree._link.connected)
            await worker.tree.heal_stale(79)  # nobody is there, and nobody waits


async def test_folders_used_by_a_worker_are_kept_fresh(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker:
            folder = await worker.walk(b"/d")
            await worker.list_all(ROOT)
            await worker.list_all(folder.inode)
            await agent.settled()
            listed = model.listed[b"/d"]
            for _ in range(40):
                # Only this worker's own answers, of which the agent hears by its report.
                assert worker.tree.hot_child(folder.inode, b"f03") is not None, mock_clock.current_time()
                mock_clock.jump(6.0)
                await agent.settled()
            assert model.listed[b"/d"] >= listed + 2


async def test_folder_that_no_worker_uses_is_let_go(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker:
            folder = await worker.walk(b"/d")
            await worker.list_all(ROOT)
            await worker.list_all(folder.inode)
            await agent.settled()
            for _ in range(40):
                mock_clock.jump(6.0)
                await agent.settled()
            assert model.listed[b"/d"] <= 2


async def test_rule_of_a_data_set_holds_for_workers(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    policy = FreshnessPolicy(refresh_s=REFRESH_S, datasets=(DatasetRule(b"/d", immutable=True),))
    with shared_mount(tmp_path, model, mock_clock, policy=policy) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            folder = await worker.walk(b"/d")
            assert worker.tree.is_immutable(folder.inode)
            assert not worker.tree.is_immutable(ROOT)
            await worker.list_all(folder.inode)
            await worker.list_all(ROOT)
            mock_clock.jump(10 * REFRESH_S)
            entry = worker.tree.hot_child(folder.inode, b"f03")
            assert entry is not None
            assert worker.tree.kernel_timeout_s(entry) == policy.immutable_kernel_timeout_s
