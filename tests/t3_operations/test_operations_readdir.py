"""READDIRPLUS without a kernel: the cookie is the inode, any reply may be the last, nothing comes twice or never."""

from __future__ import annotations

import errno
import random
import tempfile
from pathlib import Path

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t3_operations.operations_rig import CONTEXT, ROOT, refused, rig


async def test_operations_readdir_cookies_are_inodes_in_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inodes = {r.write(b"/f%d" % n, b"x"): b"f%d" % n for n in range(300)}
        page = await r.read_dir(ROOT, 0)
        assert [entry.cookie for entry in page] == sorted(inodes)
        assert all(entry.cookie == entry.attributes.st_ino for entry in page)
        assert {entry.cookie: entry.name for entry in page} == inodes
        assert r.model.listed == {b"/": 1}
        assert sum(r.model.asked.values()) == 1, "the root at the start; no call for any file"


async def test_operations_readdir_resumes_behind_any_cookie(tmp_path: Path) -> None:
    """Every cookie ever given is a place to go on from, in any order and at any reply size."""
    async with rig(tmp_path) as r:
        for n in range(200):
            r.write(b"/f%d" % n, b"x")
        whole = await r.read_dir(ROOT, 0)
        rng = random.Random(7)
        for _ in range(200):
            index, room = rng.randrange(len(whole)), rng.randrange(1, 150)
            part = await r.read_dir(ROOT, whole[index].cookie, room)
            assert [entry.name for entry in part] == [entry.name for entry in whole[index + 1 : index + 1 + room]]


async def test_operations_readdir_empty_folder_is_empty(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.model.mkdir(b"/d")
        assert await r.list_names((await r.walk(b"/d")).st_ino) == []


async def test_operations_readdir_lists_folders_files_and_incomplete_ones(tmp_path: Path) -> None:
    """S10: a file that is being written is listed like any other, at its place in the order."""
    async with rig(tmp_path) as r:
        r.write(b"/a", b"x")
        r.model.write(b"/unfinished", 0, completed=False)
        r.model.mkdir(b"/d")
        r.write(b"/z", b"x")
        assert await r.list_names(ROOT, room=1) == [b"a", b"unfinished", b"d", b"z"]


async def test_operations_readdir_of_a_file_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        with refused(errno.ENOTDIR):
            await r.operations.opendir(inode, CONTEXT)


async def test_operations_readdir_bad_name_from_the_network_hides_no_other(tmp_path: Path) -> None:
    """S08; user report 53."""
    async with rig(tmp_path) as r:
        for name in (b"good", b"x" * 256, b"also good"):
            r.write(b"/" + name, b"x")
        assert sorted(await r.list_names(ROOT)) == [b"also good", b"good"]
        assert r.metrics.snapshot()["fusecache_upstream_rejected_total{what=listing_entry}"] == 1


async def test_operations_readdir_one_listing_for_all_who_wait(tmp_path: Path) -> None:
    """User report 43: many processes that list at once cost one call."""
    async with rig(tmp_path) as r:
        for n in range(50):
            r.write(b"/f%d" % n, b"x")
        results: list[list[bytes]] = []

        async def one() -> None:
            results.append(sorted(await r.list_names(ROOT, room=10_000)))

        # The patch of readdir_reply is the process's; whole listings must not overlap inside it.
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(r.tree.children, ROOT, 0, 1000)
        await one()
        assert len(results[0]) == 50
        assert r.model.listed == {b"/": 1}


async def test_operations_readdir_removed_folder_is_estale(tmp_path: Path) -> None:
    async with rig(tmp_path, refresh_s=100) as r:
        r.model.mkdir(b"/d")
        r.write(b"/d/f", b"x")
        folder = (await r.walk(b"/d")).st_ino
        assert await r.list_names(folder) == [b"f"]
        r.model.delete(b"/d")
        r.clock.time_s += 200
        with refused(errno.ESTALE):
            await r.read_dir(folder, 0)


Change = tuple[str, int]
changes = st.lists(
    st.tuples(st.sampled_from(["add", "delete", "rewrite", "rename", "unfinished"]), st.integers(0, 30)), max_size=12
)


@given(rounds=st.lists(st.tuples(changes, st.integers(1, 9)), min_size=1, max_size=8))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_operations_readdir_what_does_not_change_is_listed_exactly_once(
    tmp_path: Path, rounds: list[tuple[list[Change], int]]
) -> None:
    """Another client changes the folder between the replies of one listing, and the mount lists it again each time."""

    async def run() -> None:
        async with rig(Path(tempfile.mkdtemp(dir=tmp_path))) as r:
            for n in range(0, 30, 2):
                r.write(b"/f%d" % n, b"x")
            names_before = set(r.model.root.children)
            touched: set[bytes] = set()
            seen: list[bytes] = []
            after = 0
            for wave, room in rounds:
                page = await r.read_dir(ROOT, after, room)
                seen += [entry.name for entry in page]
                after = page[-1].cookie if page else after
                for kind, n in wave:
                    touched |= another_client(r.model, kind, n)
                await r.tree.refresh(ROOT, force_sync=False)
            while page := await r.read_dir(ROOT, after, 7):
                seen += [entry.name for entry in page]
                after = page[-1].cookie
            steady = names_before - touched
            assert [name for name in sorted(seen) if name in steady] == sorted(steady)
            cookies_again = [entry.cookie for entry in await r.read_dir(ROOT, 0)]
            assert cookies_again == sorted(set(cookies_again))
            assert sorted(await r.list_names(ROOT, room=3)) == sorted(r.model.root.children)

    trio.run(run)


def another_client(model: AlluxioModel, kind: str, n: int) -> set[bytes]:
    """One change; the names it touched."""
    name, other = b"f%d" % n, b"f%d" % (n + 1)
    exists = name in model.root.children
    if kind in ("add", "rewrite"):
        model.write(b"/" + name, n)
    elif kind == "unfinished":
        model.write(b"/" + name, 0, completed=False)
    elif kind == "delete" and exists:
        model.delete(b"/" + name)
    elif kind == "rename" and exists:
        model.rename(b"/" + name, b"/" + other)
        return {name, other}
    return {name}
