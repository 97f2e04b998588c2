"""S22: an exception inside the daemon is EIO for that request, one traceback in the log, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.log_noise import Declare
from tests.t3_operations.operations_rig import CONTEXT, ROOT, Rig, refused, rig

EXCEPTIONS = [
    KeyError("bug"),
    MemoryError("no memory"),
    RecursionError("deep"),
    AttributeError("bug"),
    OSError(5, "io"),
]

REQUESTS: dict[str, tuple[str, str, Callable[[Rig, int], Awaitable[Any]]]] = {
    "lookup": ("_tree", "hot_child", lambda r, inode: r.operations.lookup(ROOT, b"f", CONTEXT)),
    "getattr": ("_tree", "hot", lambda r, inode: r.operations.getattr(inode, CONTEXT)),
    "opendir": ("_tree", "hot", lambda r, inode: r.operations.opendir(inode, CONTEXT)),
    "readdir": ("_tree", "children", lambda r, inode: r.read_dir(ROOT)),
    "open": ("_readers", "open", lambda r, inode: r.operations.open(inode, os.O_RDONLY, CONTEXT)),
    "read": ("_readers", "get", lambda r, inode: r.operations.read(inode, 0, 1)),
    "release": ("_readers", "release", lambda r, inode: r.operations.release(inode)),
    "statfs": ("_entries", "value", lambda r, inode: r.operations.statfs(CONTEXT)),
    "listxattr": ("_tree", "hot", lambda r, inode: r.operations.listxattr(inode, CONTEXT)),
    "getxattr": ("_tree", "hot", lambda r, inode: r.operations.getxattr(inode, b"user.fusecache.blocks", CONTEXT)),
}


class Broken:
    """Stands for a part: one of its attributes raises, the others are the part's own."""

    def __init__(self, part: object, name: str, error: Exception) -> None:
        self._part, self._name, self._error = part, name, error

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise self._error
        return getattr(self._part, name)


@pytest.mark.parametrize("op", REQUESTS)
async def test_operations_exception_in_a_handler_is_eio_and_the_next_call_is_fine(
    tmp_path: Path, op: str, expected_logs: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S22."""
    part_name, attribute, call = REQUESTS[op]
    expected_logs(rf"unexpected exception in a handler.*op='?{op}\b[\s\S]*Traceback", count=len(EXCEPTIONS))
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        part = getattr(r.operations, part_name)
        for error in EXCEPTIONS:
            with monkeypatch.context() as patch:
                patch.setattr(r.operations, part_name, Broken(part, attribute, error))
                with refused(errno.EIO):
                    await call(r, inode)
        assert r.errors(op, "EIO") == len(EXCEPTIONS)
        assert r.metrics.snapshot()["fusecache_requests_in_flight"] == 0
        assert (await r.operations.lookup(ROOT, b"f", CONTEXT)).st_ino == inode
        assert await r.read_file(inode) == b"x"


async def test_operations_requests_are_counted_by_operation(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        await r.read_file(inode)
        with refused(errno.EROFS):
            await r.operations.unlink(ROOT, b"f", CONTEXT)
        seen = r.metrics.snapshot()
        for op in ("lookup", "getattr", "open", "read", "release"):
            assert seen[f"fusecache_requests_total{{op={op}}}"] == 1
            assert seen[f"fusecache_request_duration_seconds_count{{op={op}}}"] == 1
        assert r.errors("unlink", "EROFS") == 1
