"""The store's file: whose it is, what is kept over a restart, and what is dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.cache import state_folder
from fusecache.cache import store as store_module
from fusecache.cache.listing import Intake
from fusecache.cache.record import Entry, encode
from fusecache.cache.store import MetadataStore
from fusecache.cache.writer import StoreFull
from fusecache.errors import StateError
from tests.support.log_noise import Declare

MAP_BYTES = 32 << 20


def entry(inode: int, name: bytes, parent: int = 1, length: int = 5) -> Entry:
    blocks = -(-length // 10)
    return Entry(
        inode, parent, name, False, True, True, False, False, length, 10, blocks, (), 0, 0o644, b"o", b"g", 1, b""
    )  # fmt: skip


def opened(folder: Path, cluster: str = "c1", *, root_path: bytes = b"/", boot: str = "boot-1") -> MetadataStore:
    return MetadataStore(folder, cluster, root_path=root_path, map_bytes=MAP_BYTES, boot=boot)


def put(store: MetadataStore, *entries: Entry) -> None:
    intake = Intake(store, 1, 50.0)
    intake.add([(it.inode, encode(it)) for it in entries])
    intake.commit(incomplete=0)


def found(store: MetadataStore, inode: int) -> Entry | None:
    with store.read() as txn:
        return store.entry(txn, inode)


def test_store_keeps_listings_over_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        put(store, entry(9, b"a"))
    with opened(tmp_path / "m") as store:
        assert found(store, 9) == entry(9, b"a")
        with store.read() as txn:
            state = store.folder_state(txn, 1)
        assert state is not None
        assert (state.boot, state.asked_at, state.entries) == (store.boot, 50.0, 1)


def test_store_after_a_clean_stop_and_a_reboot_is_kept_with_times_of_another_boot(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        put(store, entry(9, b"a"))
    with opened(tmp_path / "m", boot="boot-2") as store, store.read() as txn:
        state = store.folder_state(txn, 1)
        assert state is not None
        assert state.boot != store.boot


KILLED = """
import sys
from pathlib import Path
from tests.t2_cache.test_store import entry, opened, put
store = opened(Path(sys.argv[1]))
put(store, entry(9, b"a"))
print("ready", flush=True)
sys.stdin.read()
"""


def kill_a_user_of(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
        assert child.wait() == -signal.SIGKILL


def test_store_of_a_killed_process_is_kept(tmp_path: Path) -> None:
    kill_a_user_of(tmp_path / "m")
    with opened(tmp_path / "m") as store:
        assert found(store, 9) == entry(9, b"a")
        store.reader_check()


def test_store_that_was_open_when_the_machine_stopped_is_dropped(tmp_path: Path, expected_logs: Declare) -> None:
    # Its pages were never synced: the file may be torn in any way, also in ways that crash a reader.
    expected_logs("unclean stop")
    kill_a_user_of(tmp_path / "m")
    with opened(tmp_path / "m", boot="boot-2") as store:
        assert found(store, 9) is None
        put(store, entry(9, b"a"))
    with opened(tmp_path / "m", boot="boot-3") as store:
        assert found(store, 9) == entry(9, b"a")


def test_store_of_an_unknown_format_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_logs: Declare
) -> None:
    expected_logs("unknown format")
    with opened(tmp_path / "m") as store:
        put(store, entry(9, b"a"))
    monkeypatch.setattr(store_module, "FORMAT", b"fusecache-metadata-0")
    with opened(tmp_path / "m") as store:
        assert found(store, 9) is None


@pytest.mark.parametrize("damage", [b"", b"garbage" * 1000, b"\0" * 8192])
def test_store_whose_file_is_no_database_is_dropped(tmp_path: Path, damage: bytes, expected_logs: Declare) -> None:
    with opened(tmp_path / "m") as store:
        put(store, entry(9, b"a"))
    if damage:
        expected_logs("unreadable metadata")
    (tmp_path / "m" / "metadata.lmdb").write_bytes(damage)
    with opened(tmp_path / "m") as store:
        assert found(store, 9) is None
        put(store, entry(9, b"a"))
        assert found(store, 9) == entry(9, b"a")


def test_store_keeps_equal_ids_of_two_clusters_apart(tmp_path: Path) -> None:
    with opened(tmp_path / "m", "c1") as one, opened(tmp_path / "m", "c2") as two:
        put(one, entry(9, b"a"))
        put(two, entry(9, b"b", length=7))
        assert found(one, 9) == entry(9, b"a")
        assert found(two, 9) == entry(9, b"b", length=7)


def test_store_keeps_two_mounted_paths_of_a_cluster_apart(tmp_path: Path) -> None:
    # Inode 1 is another folder for each.
    with opened(tmp_path / "m", root_path=b"/x") as one, opened(tmp_path / "m", root_path=b"/y") as two:
        put(one, entry(9, b"a"))
        assert found(two, 9) is None


def test_store_of_a_reformatted_cluster_is_dropped_when_nobody_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path / "m", "old") as store:
        put(store, entry(9, b"a"))
    with opened(tmp_path / "m", "new") as store:
        assert found(store, 9) is None
    with opened(tmp_path / "m", "old") as store:
        assert found(store, 9) == entry(9, b"a"), "it was just being replaced"
    (claim,) = (tmp_path / "m").glob("old.*.claim")
    a_day_ago = claim.stat().st_mtime - state_folder.ABANDONED_S - 1
    os.utime(claim, (a_day_ago, a_day_ago))
    with opened(tmp_path / "m", "new"):
        pass
    with opened(tmp_path / "m", "old") as store:
        assert found(store, 9) is None


def test_store_of_another_cluster_whose_process_was_killed_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "m", "old") as store:
        put(store, entry(9, b"a"))
    (claim,) = (tmp_path / "m").glob("old.*.claim")
    claim.write_text("boot-1")  # as a killed process leaves it
    os.utime(claim, (1, 1))
    with opened(tmp_path / "m", "new"):
        pass
    with opened(tmp_path / "m", "old") as store:
        assert found(store, 9) == entry(9, b"a")


def test_store_of_another_cluster_in_use_is_not_dropped(tmp_path: Path) -> None:
    with opened(tmp_path / "m", "c1") as one:
        put(one, entry(9, b"a"))
        with opened(tmp_path / "m", "c2"):
            pass
        assert found(one, 9) == entry(9, b"a")


def test_store_mounted_twice_has_two_sets_of_tables(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as one:
        put(one, entry(9, b"a"))
        with opened(tmp_path / "m") as two:
            assert two.namespace != one.namespace
            assert found(two, 9) is None
    with opened(tmp_path / "m") as again:
        assert found(again, 9) == entry(9, b"a")


def test_store_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with opened(tmp_path / "new" / "m"):
            modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")}
    finally:
        os.umask(old)
    assert modes.pop("m") == 0o700
    assert set(modes.values()) == {0o600}


def test_store_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StateError, match="symbolic link"):
        opened(tmp_path / "link")


def test_store_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").chmod(0o755)
    with pytest.raises(StateError, match="0755"):
        opened(tmp_path / "m")


def test_store_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "m").stat().st_uid + 1)
    with pytest.raises(StateError, match="belongs to uid"):
        opened(tmp_path / "m")


def test_store_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(StateError, match="not a folder"):
        opened(tmp_path / "m")


def test_store_that_was_refused_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o700)
    (tmp_path / "m" / "metadata.lmdb").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StateError):
        opened(tmp_path / "m")
    assert set(os.listdir("/proc/self/fd")) == before
    (tmp_path / "m" / "metadata.lmdb").rmdir()
    opened(tmp_path / "m").close()


def test_store_with_a_full_map_says_so_and_works_after_a_reset(tmp_path: Path) -> None:
    with MetadataStore(tmp_path / "m", "c1", root_path=b"/", map_bytes=1 << 20, boot="b") as store:
        put(store, entry(9, b"a"))
        with pytest.raises(StoreFull):
            put(store, *(entry(100 + number, b"%0200d" % number) for number in range(5000)))
        assert found(store, 9) == entry(9, b"a")
        store.writer.run(store.reset)
        assert found(store, 9) is None
        put(store, entry(10, b"b"))
        assert found(store, 10) == entry(10, b"b")


def test_writer_hands_an_error_to_its_submitter_and_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:

        def fail(_: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.writer.run(fail)
        put(store, entry(9, b"a"))
        assert found(store, 9) == entry(9, b"a")


def test_writer_after_close_refuses(tmp_path: Path) -> None:
    store = opened(tmp_path / "m")
    put(store, entry(9, b"a"))
    store.close()
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.writer.run(lambda txn: None)
