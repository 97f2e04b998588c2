"""The checker of the data scenarios: reads like an application and holds every answer against the content.

Kept apart from the tests because it is an instrument: `test_instruments.py` shows that it turns red.
"""

from __future__ import annotations

import random

from tests.support.below_kernel import BelowKernel


async def check_whole(mount: BelowKernel, path: bytes, content: bytes, rng: random.Random) -> None:
    """Read from start to end in requests of random sizes; every one exact, and nothing after the end."""
    handle = await mount.open(path)
    try:
        offset = 0
        while offset < len(content):
            size = rng.choice((4 << 10, 64 << 10, 128 << 10, 1 << 20, rng.randrange(1, 300_000)))
            await check_at(mount, handle, content, offset, size)
            offset += size
        assert await mount.read(handle, len(content), 4096) == b"", "bytes behind the end"
    finally:
        await mount.release(handle)


async def check_at(mount: BelowKernel, handle: int, content: bytes, offset: int, size: int) -> None:
    """One pread: exactly the content's bytes."""
    expected = content[offset : offset + size]
    got = await mount.read(handle, offset, size)  # type: ignore[arg-type]  # FileHandleT is an int
    assert len(got) == len(expected), f"{len(got)} bytes at {offset} instead of {len(expected)}"
    assert got == expected, f"other bytes at {offset}"
