"""A folder to mount, and where. Files of tests that need another SOURCE have a fixture of their own by that name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import is_mounted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "photo.jpg").write_bytes(b"bytes")
    return folder


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    """An empty mount point; nothing may be mounted there afterwards."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    yield folder
    assert not is_mounted(folder)
