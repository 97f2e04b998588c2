"""F17: fifty processes list one folder at once. The million entries of `tests/large_folder.py`, made small."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from tests.large_folder import Listing, name_of, run
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board
from tests.t4_mount.modes import DEFAULT, MODES

pytestmark = needs_fuse

ENTRIES = 3_000
PROCESSES = 50
MEBIBYTE = 1 << 20


def test_f17_fifty_processes_list_one_folder_at_once(tmp_path: Path) -> None:
    """Each sees every name once; the master is asked once, not once a file or a process; another folder's reader goes
    on; memory stays what it was but for the entries."""
    with Board(MODES[DEFAULT[0]], tmp_path) as board:
        source = board.new_source("large")
        (source / "large").mkdir()
        (source / "other").mkdir()
        (source / "other" / "file").write_bytes(b"another folder's file")
        for number in range(ENTRIES):
            (source / "large" / name_of(number)).touch()
        digest = sum(zlib.crc32(name_of(number).encode()) for number in range(ENTRIES))
        with board.own(source, tmp_path) as mount:
            before_bytes = mount.resident_bytes()
            lists_before = mount.rpcs().get("ListStatus", 0)
            assert run(mount, Listing(ENTRIES, digest, 0.0), PROCESSES, random.Random(1)) == []
            assert mount.rpcs()["ListStatus"] - lists_before < 10, "once a folder, whoever asks"
            assert mount.resident_bytes() - before_bytes < 100 * MEBIBYTE
