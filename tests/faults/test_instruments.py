"""The instruments turn red: one deliberately broken client, proxy or plan for each checker of this folder.

A checker that never failed is no evidence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from fusecache.alluxio.block_stream import BlockStream
from fusecache.embedded.faults import FaultPlan
from fusecache.rpc.budget import Budget
from tests.faults.reading import check_whole
from tests.support.below_kernel import below_kernel, cluster_of
from tests.support.embedded import embedded_server

CONTENT = random.Random(3).randbytes(700_000)


def short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeros(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def repeated(data: bytes) -> bytes:
    """As after a resume at the wrong offset."""
    return data[:1000] + data[: len(data) - 1000]


def one_bit(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("broken", [short, zeros, repeated, one_bit])
async def test_reading_checker_sees_a_broken_stream(
    tmp_path: Path, broken: Callable[[bytes], bytes], expected_logs: Callable[..., None]
) -> None:
    expected_logs("request failed|fetch failed unexpectedly", optional=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(CONTENT)
    real, real_ready = BlockStream.read, BlockStream.read_ready

    def read(stream: BlockStream, size: int, budget: Budget) -> bytes:
        return broken(bytes(real(stream, size, budget)))

    def read_ready(stream: BlockStream, budget: Budget) -> bytes | None:
        data = real_ready(stream, budget)
        return None if data is None else broken(bytes(data))

    with embedded_server(source, tmp_path / "server") as server:
        async with below_kernel(cluster_of(server), tmp_path / "state", zero_rpc_reads=False) as mount:
            await check_whole(mount, b"/file", CONTENT, random.Random(1))
            with (
                mock.patch.multiple(BlockStream, read=read, read_ready=read_ready),
                pytest.raises(AssertionError),
            ):
                await check_whole(mount, b"/file", CONTENT, random.Random(1))


async def test_fault_plan_that_injects_nothing_shows_zero(tmp_path: Path) -> None:
    """A fault behind the end of the stream does not happen, and is not counted as if it had."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(CONTENT)
    plan = FaultPlan()
    rule = plan.on("ReadBlock").cut_after(bytes=len(CONTENT) + 1)
    with embedded_server(source, tmp_path / "server", faults=plan) as server:
        async with below_kernel(cluster_of(server), tmp_path / "state", zero_rpc_reads=False) as mount:
            await check_whole(mount, b"/file", CONTENT, random.Random(1))
    assert rule.calls > 0
    assert rule.injected == 0
