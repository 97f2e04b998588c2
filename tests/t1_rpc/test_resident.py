"""Whether parts of a file are in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.kernel.gate.resident import Residency

SIZE = (1 << 20) + 4096 + 17


def test_residency_tells_pages_in_memory_from_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        check(descriptor)
    finally:
        os.close(descriptor)


def check(descriptor: int) -> None:
    residency = Residency()
    assert os.pread(descriptor, SIZE, 0)
    resident = residency.is_resident(descriptor, 1, SIZE - 1)
    if not residency.is_known:
        pytest.skip("this kernel has no cachestat")
    assert resident
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if residency.is_resident(descriptor, 0, 4096):
        pytest.skip("this file system keeps a file's pages")
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(descriptor, 1, 8192)
    assert residency.is_resident(descriptor, 8192, 4096)
    assert not residency.is_resident(descriptor, 8191, 2)
    assert not residency.is_resident(descriptor, 8192, 4097)
    assert residency.is_known
    assert not residency.is_resident(-1, 0, 1)
