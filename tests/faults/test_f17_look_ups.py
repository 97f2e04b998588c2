"""F17: look-ups that the kernel never takes back (S44). The million of `tests/many_look_ups.py`, made small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.many_look_ups import look_everything_up, make_files
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board
from tests.t4_mount.modes import DEFAULT, MODES

needs_slabs = pytest.mark.skipif(not os.access("/proc/slabinfo", os.R_OK), reason="only root may see slabs")

pytestmark = [needs_fuse, needs_slabs]

ENTRIES = 10_000
MOST_BYTES = 2 << 20
"""200 bytes a look-up: less than any table entry in Python. Measured: a quarter of a megabyte."""


def grown(mode: str, folder: Path, kept: int) -> list[str]:
    """What is wrong with a mount that keeps so many entries in memory."""
    with Board(MODES[mode], folder) as board:
        source = board.new_source("many")
        make_files(source, ENTRIES)
        with board.own(source, folder, "--refresh-s", "6h", "--metadata-hot-entries", str(kept)) as mount:
            return look_everything_up(mount, ENTRIES, MOST_BYTES)


@pytest.mark.parametrize("mode", [DEFAULT[0], pytest.param("classic", marks=pytest.mark.long)])
def test_f17_look_ups_cost_no_memory(mode: str, tmp_path: Path) -> None:
    """The kernel holds an inode for each file and has taken none back; the processes have not grown."""
    assert grown(mode, tmp_path, kept=1_000) == []


@pytest.mark.long
def test_f17_what_is_kept_for_each_look_up_is_seen(tmp_path: Path) -> None:
    """The measurement's own proof: a mount that may keep every entry is caught."""
    (wrong,) = grown(DEFAULT[0], tmp_path, kept=2 * ENTRIES)
    assert "the processes have grown by" in wrong
