"""Many readers at once: of one file, of many, mapped, in more processes than there are threads to serve them."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache.daemon.mountpoint import find_mount
from tests.support.mounting import needs_fuse
from tests.support.readers import Load
from tests.t4_mount.board import Board, Place, warm
from tests.t4_mount.live_mount import EmbeddedProcess, by_label, eventually

pytestmark = needs_fuse

KIB, MIB = 1 << 10, 1 << 20
SHARD = 9 * MIB + 777
"""Size of the large file: no multiple of a page or a block."""

SMALL_FILES = 60


class Data:
    """One large file and many small ones, all of them local."""

    def __init__(self, place: Place, shard: bytes, small: list[str], many: int) -> None:
        self.place = place
        self.shard = shard
        self.small = small
        self.many = many
        """How many processes are more than anybody counts with; starting them is most of the work."""

    def open_cold(self) -> int:
        """A descriptor of the large file, its pages forgotten."""
        descriptor = os.open(self.place.shown / "shard", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor

    def load(self, *names: str, processes: int, ways: tuple[str, ...]) -> Load:
        return Load(self.place.shown, self.place.source, names or self.small, processes=processes, ways=ways)


@pytest.fixture(scope="module", params=["folder", "blocks"])
def data(request: pytest.FixtureRequest, board: Board) -> Data:
    """One block file per file, and several."""
    place = board.place(request.param, "streams")
    rng = random.Random(7)
    shard = rng.randbytes(SHARD)
    (place.source / "shard").write_bytes(shard)
    small = [f"f{number}" for number in range(SMALL_FILES)]
    for name in small:
        (place.source / name).write_bytes(rng.randbytes(rng.randrange(1, 40_000)))
    place.warm()  # in passthrough mode it proves that the kernel reads these files itself
    return Data(place, shard, small, 64 if request.param == "folder" else 20)


def test_mount_streams_local_blocks_are_read_without_a_worker(board: Board, tmp_path: Path) -> None:
    """S34: a file of several blocks, once its blocks are confirmed: the gate answers, mostly without copying itself."""
    if board.mode.served == "classic":
        pytest.skip("there is no gate")
    source = board.new_source("blocks")
    content = os.urandom(5 * MIB + 777)
    (source / "f").write_bytes(content)
    with (
        EmbeddedProcess(source, tmp_path / "embedded", "--block-size-bytes", "1MiB") as server,
        board.own(server.url, tmp_path) as mount,
    ):
        path = mount.root / "f"
        warm(path)

        def read_by_the_gate() -> bool:
            before = mount.gate()
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                assert file.read() == content
            after = mount.gate()
            asked = after["dispatched"].get("READ", 0) - before["dispatched"].get("READ", 0)
            return asked == 0 and after["direct_reads"]["bytes"] - before["direct_reads"]["bytes"] == len(content)

        eventually(read_by_the_gate, "all of it is read by the gate")
        assert mount.gate()["direct_reads"]["mapped_bytes"] > 4 * MIB
        for offset, size in ((0, 4096), (MIB - 4096, 8192), (3 * MIB + 5, MIB), (5 * MIB, 4096), (5 * MIB + 700, 4096)):
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(file.fileno(), size, offset) == content[offset : offset + size]


def assert_right(load: Load) -> None:
    report = load.stop()
    assert report.errors == [], report.describe()
    assert report.wrong == [], report.describe()
    assert all(report.calls), "every reader got on"


@pytest.mark.parametrize("descriptors", [1, 4])
def test_mount_streams_four_at_once_in_one_file(data: Data, descriptors: int) -> None:
    """Loaders that read several parts of a shard from start to end at the same time, by one descriptor or several."""
    opened = [data.open_cold() for _ in range(descriptors)]
    quarter = -(-SHARD // 4)

    def stream(number: int) -> bool:
        descriptor, start = opened[number % descriptors], number * quarter
        end = min(SHARD, start + quarter)
        return all(
            os.pread(descriptor, min(100_000, end - offset), offset) == data.shard[offset : min(end, offset + 100_000)]
            for offset in range(start, end, 100_000)
        )

    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(stream, range(4))) == [True] * 4
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_mount_streams_four_processes_map_one_file(data: Data) -> None:
    """As safetensors and np.memmap read: pages by chance, from several processes, some of them just forgotten."""
    with data.load("shard", processes=4, ways=("mapped",)) as load:
        load.wait_for_calls(400)
        assert_right(load)


def test_mount_streams_eight_processes_read_one_file_whole(data: Data) -> None:
    """User report 26: as workers read one large arrow file; no zeros under load."""
    os.close(data.open_cold())
    with data.load("shard", processes=8, ways=("whole",)) as load:
        load.wait_for_calls(40)
        assert_right(load)


def test_mount_streams_mapped_read_and_direct_at_once(data: Data) -> None:
    """One file by every way there is: none of them sees anything else than the others."""
    with data.load("shard", processes=6, ways=("mapped", "piece", "direct", "whole")) as load:
        load.wait_for_calls(200)
        assert_right(load)


def test_mount_streams_more_processes_than_threads_all_get_on(data: Data) -> None:
    """User report 39: 32 readers of a pool of 16; every one of them reads, none waits for ever."""
    with data.load(processes=data.many // 2, ways=("whole", "piece")) as load:
        eventually(lambda: min(load.calls()) >= 10, "ten calls of every reader")
        assert_right(load)


def test_mount_streams_direct_readers_end_when_they_are_killed(data: Data) -> None:
    """User report 40: 64 readers past the page cache; SIGKILL ends them within seconds, and the mount goes on."""
    with data.load("shard", processes=data.many, ways=("direct",)) as load:
        load.wait_for_calls(200)
        load.kill(within_s=5.0)
    descriptor = data.open_cold()
    try:
        assert os.pread(descriptor, SHARD, 0) == data.shard
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a mount's read-ahead")
def test_mount_streams_read_ahead_larger_than_any_request(data: Data) -> None:
    """User report 37: no early end and no other bytes when the kernel asks for more than fits into one request."""
    info = find_mount(data.place.mount.root)
    assert info is not None
    setting = Path(f"/sys/class/bdi/{info.device}/read_ahead_kb")
    before = setting.read_text()
    try:
        for kib in ("16384", "4", "0"):
            setting.write_text(kib)
            descriptor = data.open_cold()
            try:
                pieces = [os.pread(descriptor, 300_000, offset) for offset in range(0, SHARD, 300_000)]
            finally:
                os.close(descriptor)
            assert b"".join(pieces) == data.shard
    finally:
        setting.write_text(before)


def test_mount_streams_second_epoch_comes_from_this_node(data: Data) -> None:
    """User reports 47 and 48: what is local is read without a call, and without a byte from anywhere else."""
    mount = data.place.mount

    def epoch() -> None:
        for name in (*data.small, "shard"):
            descriptor = os.open(data.place.shown / name, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                while os.read(descriptor, MIB):
                    pass
            finally:
                os.close(descriptor)

    epoch()
    sources, rpcs = mount.sources(), mount.rpcs()
    epoch()
    after = mount.sources()
    assert {source for source in after if after[source] != sources.get(source, 0)} <= {"local_block"}
    called = {method for method, calls in mount.rpcs().items() if calls != rpcs.get(method, 0)}
    # GetBlockMasterInfo: statfs(2), which whoever looks at all mounts of the machine asks, not a reader.
    assert called <= {"OpenLocalBlock", "GetBlockMasterInfo"}


def test_mount_streams_thousands_of_df_cost_nothing(data: Data) -> None:
    """1,000 statfs a second, as monitoring and data loaders ask: all the same answer, and reads go on."""
    mount = data.place.mount
    first = os.statvfs(mount.root)
    before = by_label(mount.metrics(), "fusecache_rpcs_total", "method")

    def ask(number: int) -> set[tuple[int, ...]]:
        path = mount.root if number % 2 else data.place.shown / "shard"
        return {tuple(os.statvfs(path)) for _ in range(750)}

    with ThreadPoolExecutor(4) as pool, data.load(processes=2, ways=("piece",)) as load:
        answers = set().union(*pool.map(ask, range(4)))
        load.wait_for_calls(20)
        assert_right(load)
    assert {answer[2] for answer in answers} == {first.f_blocks}
    after = by_label(mount.metrics(), "fusecache_rpcs_total", "method")
    asked = {method: after[method] - before.get(method, 0) for method in after}
    for method in ("GetBlockMasterInfo", "GetWorkerInfoList"):
        assert asked.get(method, 0) <= 2, "the capacity is asked for once a minute at most"
