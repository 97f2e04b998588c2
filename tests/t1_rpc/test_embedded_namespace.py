"""The embedded master's memory while its folder is being scanned: nobody waits, nothing newer is undone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.clock import SystemClock
from fusecache.embedded import namespace as module
from fusecache.embedded.inode import Inode
from fusecache.embedded.namespace import Load, Namespace
from fusecache.embedded.source import Found, SourceFolder
from fusecache.errors import NotFound
from tests.support.embedded import replace


class SourceWithPause(SourceFolder):
    """A source whose next scan calls a function after it has looked at everything and before it says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.meanwhile: Callable[[], None] | None = None

    def scan(self, path: bytes) -> Iterator[tuple[bytes, Found]]:
        found = list(super().scan(path))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        yield from found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def source(folder: Path) -> SourceWithPause:
    return SourceWithPause(folder)


@pytest.fixture
def gone() -> list[Inode]:
    return []


@pytest.fixture
def namespace(source: SourceWithPause, tmp_path: Path, gone: list[Inode]) -> Iterator[Namespace]:
    (tmp_path / "database").mkdir()
    opened = Namespace(tmp_path / "database", source, block_size=1000, clock=SystemClock(), on_gone=gone.append)
    yield opened
    opened.close()


def names(namespace: Namespace, sync_interval_ms: int = -1) -> list[bytes]:
    batches = namespace.list_folder(b"/", Load.ONCE, sync_interval_ms, 100)
    return [inode.name for _, batch in batches for inode in batch]


def test_name_loaded_during_a_scan_is_counted_once(namespace: Namespace, source: SourceWithPause, folder: Path) -> None:
    (folder / "a").touch()
    (folder / "b").touch()
    source.meanwhile = lambda: namespace.get(b"/a", Load.ONCE, -1) and None
    assert names(namespace) == [b"a", b"b"]
    assert namespace.get(b"/", Load.ONCE, -1).children == 2


def test_removal_is_noticed_though_another_name_was_loaded_during_the_scan(
    namespace: Namespace, source: SourceWithPause, folder: Path
) -> None:
    (folder / "old").touch()
    assert names(namespace) == [b"old"]
    (folder / "old").unlink()
    (folder / "new").touch()
    # The new name is known before the scan gets to it: as many names are seen again as were known before.
    source.meanwhile = lambda: namespace.get(b"/new", Load.ONCE, -1) and None
    assert names(namespace, 0) == [b"new"]
    assert namespace.get(b"/", Load.ONCE, -1).children == 1


def test_newer_look_is_not_undone_by_a_scan_that_looked_earlier(
    namespace: Namespace, source: SourceWithPause, folder: Path
) -> None:
    (folder / "file").write_bytes(b"1")
    names(namespace)
    newest: list[Inode] = []

    def change() -> None:
        replace(folder / "file", b"22")
        newest.append(namespace.get(b"/file", Load.ONCE, 0))

    source.meanwhile = change
    names(namespace, 0)
    assert namespace.get(b"/file", Load.ONCE, -1) == newest[0]
    assert newest[0].length == 2


def test_name_removed_after_the_scan_saw_it_changed_is_gone(
    namespace: Namespace, source: SourceWithPause, folder: Path
) -> None:
    (folder / "file").write_bytes(b"1")
    names(namespace)
    replace(folder / "file", b"22")
    source.meanwhile = (folder / "file").unlink
    assert names(namespace, 0) == []
    assert namespace.get(b"/", Load.ONCE, -1).children == 0


def test_failed_scan_leaves_the_folder_as_it_was(namespace: Namespace, source: SourceWithPause, folder: Path) -> None:
    (folder / "file").touch()
    names(namespace)

    def fail() -> None:
        raise NotFound("the disk is gone")

    source.meanwhile = fail
    with pytest.raises(NotFound, match="the disk is gone"):
        names(namespace, 0)
    assert names(namespace) == [b"file"]
    (folder / "more").touch()
    assert names(namespace, 0) == [b"file", b"more"]


def test_every_replaced_and_removed_file_is_reported_once(
    namespace: Namespace, folder: Path, gone: list[Inode]
) -> None:
    (folder / "tree" / "deep").mkdir(parents=True)
    for name in ("tree/one", "tree/deep/two", "three", "four", "same"):
        (folder / name).write_bytes(b"1")
    known = {name: namespace.get(b"/" + name, Load.ONCE, -1) for name in (b"tree/one", b"tree/deep/two", b"three")}
    names(namespace)
    replace(folder / "three", b"22")
    os.rename(folder / "tree", folder / "elsewhere")
    names(namespace, 0)
    assert sorted(gone) == sorted(known.values())


def test_folders_are_removed_in_batches(
    namespace: Namespace, folder: Path, gone: list[Inode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCAN_BATCH", 3)
    (folder / "tree").mkdir()
    for number in range(10):
        (folder / "tree" / f"{number}").touch()
    assert len([b for _, b in namespace.list_folder(b"/tree", Load.ONCE, -1, 4)]) == 3
    os.rename(folder / "tree", folder.parent / "away")
    with pytest.raises(NotFound):
        namespace.get(b"/tree", Load.ONCE, 0)
    assert len(gone) == 10
    (folder / "tree").mkdir()
    assert namespace.get(b"/tree", Load.ONCE, 0).children == 0
    assert list(namespace.list_folder(b"/tree", Load.ONCE, -1, 4)) == []


def test_folder_ids_move_to_a_new_container_when_one_is_full(
    namespace: Namespace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusecache.embedded.inode.LAST_SEQUENCE", 3)
    for number in range(4):
        (folder / f"{number}").mkdir()
    ids = [namespace.get(f"/{number}".encode(), Load.ONCE, -1).id for number in range(4)]
    # Sequence 3 would name a file: after 1 and 2 comes the first of container 1.
    assert ids == [1, 2, 1 << 24, (1 << 24) + 1]
