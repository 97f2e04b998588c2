"""Owner names become numbers of this machine, root never by accident."""

from __future__ import annotations

import os

from fusecache.config.settings import Settings
from fusecache.fs.ownership import NOBODY, Ownership


def test_ownership_explicit_map_wins() -> None:
    ownership = Ownership(Settings(owner_map={"alice": 1234}, group_map={"staff": 77}, uid=5, gid=6))
    assert ownership.uid(b"alice") == 1234
    assert ownership.gid(b"staff") == 77


def test_ownership_unknown_name_gets_the_configured_default() -> None:
    ownership = Ownership(Settings(uid=5, gid=6))
    assert (ownership.uid(b"nobody-knows"), ownership.gid(b"nobody-knows")) == (5, 6)


def test_ownership_unknown_name_is_never_root_by_accident() -> None:
    ownership = Ownership(Settings())
    expected = os.geteuid() or NOBODY
    assert ownership.uid(b"root") == expected
    assert ownership.uid(b"root") != 0


def test_ownership_map_names_uses_the_machines_databases() -> None:
    ownership = Ownership(Settings(map_names=True, uid=5, gid=6))
    assert ownership.uid(b"daemon") == 1
    assert ownership.gid(b"daemon") == 1
    assert ownership.uid(b"no-such-user-here") == 5


def test_ownership_name_that_is_not_text_gets_the_default() -> None:
    ownership = Ownership(Settings(map_names=True, uid=5))
    assert ownership.uid(b"\xff\xfe\0") == 5
