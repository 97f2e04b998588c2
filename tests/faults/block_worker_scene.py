"""What the scenarios of failing block workers (F07, F08) share: a mount below the kernel, proxies in front of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fusecache.embedded.faults import FaultPlan
from fusecache.embedded.server import EmbeddedServer
from tests.support.below_kernel import BelowKernel, below_kernel, cluster_of
from tests.support.embedded import embedded_server
from tests.support.faulty_proxy import FaultyProxy

BLOCK_BYTES = 1 << 20
CONTENT = random.Random(7).randbytes(3 * BLOCK_BYTES + 12345)
STALL_S = 0.3
FAILED = "fusecache_block_sources_failed_total{source=%s}"

SETTINGS: dict[str, object] = {
    "zero_rpc_reads": False, "stall_s": STALL_S, "connect_s": 1.0, "read_budget_s": 20.0, "fetch_bytes": 512 << 10,
    "chunk_bytes": 64 << 10,
}  # fmt: skip


class Scene(NamedTuple):
    mount: BelowKernel
    server: EmbeddedServer
    proxies: list[FaultyProxy]
    """One before each block worker; none where they were not asked for."""


@asynccontextmanager
async def scene(
    tmp_path: Path, *, workers: int = 2, faults: FaultPlan | None = None, proxied: bool = False, **settings: object
) -> AsyncIterator[Scene]:
    """A mount over `workers` block workers, and two files of four blocks that none of them has yet."""
    source = tmp_path / "source"
    source.mkdir(parents=True)
    for name in ("file", "other"):
        (source / name).write_bytes(CONTENT)
    proxies: list[FaultyProxy] = []

    def through_proxies(method: str, answer: Any) -> Any:
        if method == "GetWorkerInfoList" and proxies:
            for info, proxy in zip(answer.workerInfos, proxies, strict=True):
                host, _, port = proxy.target.rpartition(":")
                info.address.host = host.encode()
                info.address.containerHost = b""
                info.address.dataPort = info.address.rpcPort = int(port)
        return answer

    with ExitStack() as stack:
        server = stack.enter_context(
            embedded_server(
                source, tmp_path / "server", block_workers=workers, block_size=BLOCK_BYTES, faults=faults,
                link_blocks=False, rewrite=through_proxies if proxied else None,
            )
        )  # fmt: skip
        if proxied:
            proxies += [stack.enter_context(FaultyProxy(target)) for target in server.worker_targets]
        async with AsyncExitStack() as mounts:
            mount = await mounts.enter_async_context(
                below_kernel(cluster_of(server), tmp_path / "state", **{**SETTINGS, **settings})
            )
            yield Scene(mount, server, proxies)


def failures(mount: BelowKernel) -> float:
    """Sources that failed so far."""
    return mount.count(FAILED % "block_worker") + mount.count(FAILED % "ufs")
