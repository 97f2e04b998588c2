"""A worker's view of the tree: what it answers itself, what it asks, and what happens when the agent goes away."""

from __future__ import annotations

from pathlib import Path

from trio.testing import MockClock

from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t2_cache.harness import TestClock
from tests.t3_operations.remote_rig import shared_mount


async def test_file_of_a_folder_not_listed_yet_is_asked_for_and_found_again_by_its_inode(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    model = AlluxioModel()
    model.mkdir(b"/d")
    node = model.write(b"/d/f", 5)
    with shared_mount(tmp_path, model, TestClock(mock_clock)) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            found = await worker.walk(b"/d/f")
            assert (found.inode, found.length) == (node.file_id + 1, 5)
            assert await worker.tree.getattr(found.inode) == found
            assert worker.tree.path(found.inode) == b"/d/f"
            assert worker.tree.ufs_path(found.inode) == b"s3://bucket/d/f"
            assert not worker.tree.superseded(found.inode)
