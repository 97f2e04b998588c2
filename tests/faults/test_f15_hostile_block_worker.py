"""F15: a block worker that lies in its streams. Its bytes are not used, the other one's are, and nothing else suffers.

What single lies do to a stream and to a login is tested at the client; here: what an application sees meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from fusecache.embedded.faults import FaultPlan
from tests.faults.reading import check_whole
from tests.support.below_kernel import BelowKernel, below_kernel, cluster_of
from tests.support.embedded import embedded_server

BLOCK_BYTES = 256 << 10
CONTENT = random.Random(15).randbytes(4 * BLOCK_BYTES + 77)


@pytest.mark.parametrize("by", [1, -1, 100_000, -100_000])
async def test_block_worker_of_wrong_lengths_is_left_and_others_are_not_affected(
    tmp_path: Path, by: int, expected_logs: Callable[..., None]
) -> None:
    """S01, S23: too many bytes and too few with status OK; two files at once, look-ups and listings beside them."""
    expected_logs("block worker failed|upstream data rejected", optional=True)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(CONTENT)
    plan = FaultPlan()
    lie = plan.on("ReadBlock", worker=0).wrong_length(by)
    with embedded_server(
        source, tmp_path / "server", block_workers=2, block_size=BLOCK_BYTES, faults=plan, link_blocks=False
    ) as server:
        async with below_kernel(cluster_of(server), tmp_path / "state", zero_rpc_reads=False) as mount:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number, path in enumerate((b"/one", b"/two")):
                        nursery.start_soon(check_whole, mount, path, CONTENT, random.Random(number))
                    nursery.start_soon(look_around, mount)
            assert lie.injected > 0
            assert mount.count("fusecache_requests_in_flight") == 0


async def look_around(mount: BelowKernel) -> None:
    """Requests that need no block worker."""
    for _ in range(20):
        assert await mount.names() == [b"one", b"two"]
        assert (await mount.stat(b"/two")).st_size == len(CONTENT)
