"""What the kernel has to forget because of a change."""

from __future__ import annotations

import pytest

from fusecache.cache.listing_diff import Change
from fusecache.fs.invalidation import pushes_of


@pytest.mark.parametrize("kind", ["added", "removed", "replaced"])
def test_pushes_name_changes_invalidate_the_entry(kind: str) -> None:
    assert pushes_of(Change(kind, 7, b"a", 9)) == (("entry", 7, b"a"),)  # type: ignore[arg-type]


def test_pushes_attribute_change_keeps_the_pages() -> None:
    assert pushes_of(Change("attributes", 7, b"a", 9)) == (("attributes", 9, b""),)


def test_pushes_folder_is_invalidated_with_its_content() -> None:
    assert pushes_of(Change("folder", 7, b"", 9)) == (("inode", 9, b""),)
