"""S24: two clusters that number their files alike share a state folder and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from fusecache.embedded.server import EmbeddedServer
from tests.support.below_kernel import BelowKernel, below_kernel, cluster_of
from tests.support.embedded import embedded_server

NAMES = [b"f%02d" % number for number in range(20)]


def source(folder: Path, mark: bytes) -> Path:
    """The same names, made in the same order, with contents (and lengths) of the cluster's own."""
    (folder / "sub").mkdir(parents=True)
    for name in NAMES:
        (folder / name.decode()).write_bytes(mark * 100 + name)
        (folder / "sub" / name.decode()).write_bytes(mark * 200 + name)
    return folder


def two_servers(stack: ExitStack, tmp_path: Path) -> list[tuple[EmbeddedServer, bytes]]:
    """Two fresh clusters; each numbers from the same first id."""
    return [
        (
            stack.enter_context(
                embedded_server(source(tmp_path / f"source{mark!r}", mark), tmp_path / f"server{mark!r}")
            ),
            mark,
        )
        for mark in (b"one", b"another")
    ]


async def check(mount: BelowKernel, mark: bytes) -> dict[bytes, int]:
    """Everything is this cluster's own; path -> inode."""
    inodes = {}
    for folder, times in ((b"/", 100), (b"/sub/", 200)):
        for name, attributes in await mount.listing(folder):
            if name == b"sub":
                continue
            content = mark * times + name
            assert attributes.st_size == len(content)
            assert (await mount.stat(folder + name)).st_size == len(content)
            assert await mount.read_all(folder + name) == content
            inodes[folder + name] = attributes.st_ino
    assert len(inodes) == 2 * len(NAMES)
    return inodes


@pytest.mark.parametrize("local", [True, False])
async def test_two_clusters_with_equal_ids_one_after_the_other_never_mix(tmp_path: Path, local: bool) -> None:
    """S24: what one cluster's mount has left in the state folder is not found by the other's, and is found again."""
    with ExitStack() as stack:
        seen = []
        for server, mark in two_servers(stack, tmp_path) * 2:
            async with below_kernel(cluster_of(server, local=local), tmp_path / "state", immutable=True) as mount:
                seen.append(await check(mount, mark))
        assert seen[0] == seen[1], "the ids are not equal, so nothing was tested"


async def test_two_clusters_with_equal_ids_side_by_side_never_mix(tmp_path: Path) -> None:
    """S24: two mounts of two clusters over one state folder, in turns."""
    with ExitStack() as stack:
        (first, first_mark), (second, second_mark) = two_servers(stack, tmp_path)
        async with (
            below_kernel(cluster_of(first, local=True), tmp_path / "state") as one,
            below_kernel(cluster_of(second, local=True), tmp_path / "state") as another,
        ):
            for _ in range(2):
                assert await check(one, first_mark) == await check(another, second_mark)
