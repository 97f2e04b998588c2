"""F14: a master that lies. Impossible entries are left out and hide no other; impossible answers are EIO with one line;
nothing loops, nothing grows, and the next request is fine."""

from __future__ import annotations

import errno
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
from pyfuse3 import FUSEError

from fusecache.config.settings import ClusterConfig
from fusecache.pb.alluxio.file_system_master_pb2 import ListStatusPResponse
from tests.faults.waiting import refused, until
from tests.support.below_kernel import BelowKernel, below_kernel
from tests.support.scripted_alluxio import ScriptedAlluxio, file_info, folder_info

ROOT_ID = 1
MAX_GROWTH_BYTES = 64 << 20
REJECTED = "fusecache_upstream_rejected_total"
WELL_ID = 55 << 24
GOOD = [
    file_info(b"/good1", container=101, length=10),
    file_info(b"/good2", container=102, length=0),
    folder_info(b"/well", file_id=WELL_ID),
]
GOOD_NAMES = [b"good1", b"good2", b"well"]


def hostile_entries(folder: bytes) -> dict[str, Any]:
    """Impossible children of `folder`, by what is wrong with each."""

    def named(name: bytes, at: bytes = b"", **fields: Any) -> Any:
        return file_info(at or folder + b"/" + name, container=7, length=0, name=name, **fields)

    def file(length: int, **fields: Any) -> Any:
        return file_info(folder + b"/name", container=7, length=length, **fields)

    huge = file(10)
    huge.length = 2**63 - 1
    return {
        "slash": named(b"a/b"),
        "nul": named(b"a\0b"),
        "dot": named(b"."),
        "dotdot": named(b".."),
        "empty": named(b""),
        "long": named(b"x" * 300),
        "of another folder": named(b"moved", at=b"/elsewhere/moved"),
        "climbs": named(b"up", at=folder + b"/../up"),
        "negative length": file(-1),
        "largest length": huge,
        "block size 0": file(10, block_size=0),
        "negative block size": file(10, block_size=-5),
        "missing block": file(300, block_size=100, blockIds=[7 << 24, 7 << 24 | 1]),
        "overlapping blocks": file(200, block_size=100, blockIds=[7 << 24, 7 << 24]),
        "another file's blocks": file(10, blockIds=[101 << 24]),
        "negative id": named(b"negative", fileId=-5),
        "the root's inode": folder_info(folder + b"/self", file_id=0),
        "strange mode": named(b"setuid", mode=0o1777777),
    }


@asynccontextmanager
async def lying(tmp_path: Path, **settings: object) -> AsyncIterator[tuple[ScriptedAlluxio, BelowKernel]]:
    """A scripted master with a good root, mounted."""
    with ScriptedAlluxio() as server:
        server.files[b"/"] = folder_info(b"/", file_id=ROOT_ID, name=b"")
        server.children[b"/"] = [GOOD]
        server.files[b"/well"] = GOOD[2]
        server.children[b"/well"] = [[file_info(b"/well/file", container=56, length=3)]]
        cluster = ClusterConfig(name="test", masters=(server.target,))
        chosen: dict[str, object] = {"metadata_budget_s": 3.0, "rpc_try_s": 1.0, "connect_s": 1.0, **settings}
        async with below_kernel(cluster, tmp_path / "state", **chosen) as mount:
            yield server, mount


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None]) -> None:
    """What is refused is said, but not each time."""
    expected_logs("upstream data rejected", optional=True)


def rejected(mount: BelowKernel) -> float:
    """Everything refused so far, of whatever kind."""
    return sum(count for name, count in mount.metrics.snapshot().items() if name.startswith(REJECTED))


async def still_serves(mount: BelowKernel) -> None:
    """The next request, to another folder, is as if nothing had been."""
    with trio.fail_after(10):
        assert (await mount.stat(b"/well")).st_ino == WELL_ID + 1
        assert await mount.names(b"/well") == [b"file"]


async def test_impossible_entry_of_a_listing_hides_no_other(tmp_path: Path) -> None:
    """S08, S23: left out and counted; its neighbours before and behind it are served."""
    async with lying(tmp_path) as (server, mount):
        folders = []
        for number, what in enumerate(hostile_entries(b"/x")):
            folder = b"/f%d" % number
            folders.append(folder_info(folder, file_id=(200 + number) << 24))
            first = file_info(folder + b"/first", container=1000 + number, length=10)
            last = file_info(folder + b"/last", container=2000 + number, length=10)
            server.children[folder] = [[first, hostile_entries(folder)[what], last]]
        server.children[b"/"] = [[*GOOD, *folders]]
        assert len(await mount.names()) == len(GOOD) + len(folders)
        for number, what in enumerate(hostile_entries(b"/x")):
            before = rejected(mount)
            assert await mount.names(b"/f%d" % number) == [b"first", b"last"], what
            assert rejected(mount) == before + 1, what
            assert (await mount.stat(b"/f%d/last" % number)).st_size == 10
        await still_serves(mount)


async def test_second_entry_of_a_name_or_of_an_id_is_left_out(tmp_path: Path) -> None:
    async with lying(tmp_path) as (server, mount):
        server.children[b"/"] = [
            [*GOOD, file_info(b"/good1", container=8, length=99), file_info(b"/twin", container=101, length=10)]
        ]
        listing = await mount.listing()
        assert sorted(name for name, _ in listing) == GOOD_NAMES
        assert len({attributes.st_ino for _, attributes in listing}) == len(GOOD)
        assert (await mount.stat(b"/good1")).st_size == 10
        await still_serves(mount)


async def test_impossible_answer_to_a_look_up_is_eio(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    """S23: GetStatus of one name, answered with an impossible file: EIO and one line each, no traceback."""
    kinds = hostile_entries(b"/asked")
    expected_logs("request failed")
    async with lying(tmp_path) as (server, mount):
        server.children[b"/"] = [[*GOOD, folder_info(b"/asked", file_id=77 << 24)]]
        await mount.names()
        server.on("ListStatus", _refuse_one_folder(server))
        for what, info in kinds.items():
            server.files.clear()
            # Asked for by the name that it gives itself, where anybody could ask for that.
            possible = info.path == b"/asked/" + info.name and what not in ("slash", "nul", "dot", "dotdot", "empty")
            path = info.path if possible and len(info.name) < 256 else b"/asked/name of " + what.encode()
            server.files[path] = info
            with trio.fail_after(10), refused(errno.EIO):
                await mount.stat(path)
            assert any(call.request.path == path for call in server.calls("GetStatus")), what
        await still_serves(mount)


def _refuse_one_folder(server: ScriptedAlluxio) -> Callable[[Any, Any], Iterator[Any]]:
    """`/asked` can't be listed, so that look-ups in it have to ask by name."""

    def answers(request: Any, context: Any) -> Iterator[Any]:
        if request.path == b"/asked":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not to be listed")
        return (ListStatusPResponse(fileInfos=infos) for infos in server.children.get(request.path, []))

    return answers


async def test_folder_that_contains_itself_ends(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    """Ids that make a loop of folders: an entry with its folder's id, and one with its grandparent's."""
    expected_logs("request failed", optional=True)
    async with lying(tmp_path) as (server, mount):
        outer, inner = 20 << 24, 21 << 24
        server.children[b"/"] = [[*GOOD, folder_info(b"/outer", file_id=outer)]]
        server.files[b"/outer"] = folder_info(b"/outer", file_id=outer)
        server.children[b"/outer"] = [
            [folder_info(b"/outer/self", file_id=outer), folder_info(b"/outer/inner", file_id=inner)]
        ]
        server.children[b"/outer/inner"] = [[folder_info(b"/outer/inner/back", file_id=outer)]]
        path = b"/outer"
        with trio.fail_after(30):
            for name in itertools.islice(itertools.cycle([b"inner", b"back"]), 40):
                path += b"/" + name
                try:
                    await mount.names(path)
                except (FUSEError, FileNotFoundError):
                    continue  # any errno: what matters is that it ends
            for name in (b"self", b"inner"):
                try:
                    await mount.stat(b"/outer/" + name)
                except (FUSEError, FileNotFoundError):
                    continue
            assert set(GOOD_NAMES) <= set(await mount.names())
        await still_serves(mount)


def resident_bytes() -> int:
    """Private memory of this process, pages of mapped files left out."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


async def test_endless_listing_ends_with_the_budget_and_does_not_grow(
    tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """Entry after entry without end: EIO when the budget is over, memory bounded, and nothing of it is served."""
    expected_logs("request failed")
    sent = [0]

    def endless(request: Any, context: Any) -> Iterator[Any]:
        if request.path != b"/":
            yield from (ListStatusPResponse(fileInfos=infos) for infos in server.children.get(request.path, []))
            return
        for start in itertools.count(1000, 1000):
            if not context.is_active():
                return
            sent[0] = start
            yield ListStatusPResponse(
                fileInfos=[file_info(b"/%09d" % n, container=n, length=0) for n in range(start, start + 1000)]
            )

    async with lying(tmp_path) as (server, mount):
        server.on("ListStatus", endless)
        before = resident_bytes()
        with trio.fail_after(20), refused(errno.EIO):
            await mount.names()
        assert sent[0] > 5000
        assert resident_bytes() - before < MAX_GROWTH_BYTES, f"{sent[0]} entries"
        await still_serves(mount)
        server.on(
            "ListStatus",
            lambda request, context: iter([ListStatusPResponse(fileInfos=server.children[request.path][0])]),
        )

        async def whole() -> bool:
            try:
                return await mount.names() == GOOD_NAMES
            except FUSEError:
                return False  # it joined the end of the endless one

        await until(whole, 20, "the good listing")


async def test_same_entries_sent_for_ever_do_not_grow(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    expected_logs("request failed", count=1)
    message = ListStatusPResponse(fileInfos=[file_info(b"/%d" % n, container=n, length=0) for n in range(1000, 2000)])
    sent = [0]

    def again_and_again(request: Any, context: Any) -> Iterator[Any]:
        while context.is_active():
            sent[0] += 1
            yield message

    async with lying(tmp_path) as (server, mount):
        server.on("ListStatus", again_and_again)
        before = resident_bytes()
        with trio.fail_after(20), refused(errno.EIO):
            await mount.names()
        assert sent[0] > 5
        assert resident_bytes() - before < MAX_GROWTH_BYTES
