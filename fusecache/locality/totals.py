"""How large a data set is, as far as its folders have been listed, and which of them have not. Pure.

A data set is a folder with everything below it. Each folder's own sum is remembered with the key of its listing and
made again only when the listing is another one, so that a survey of a data set at rest costs one look at each folder.

It does not read the metadata: the caller gives `key_of` and `read`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

MAX_FOLDERS: Final = 50_000
"""Folders whose sums are remembered (about 300 bytes each); others are summed up again by every survey."""

MAX_UNLISTED: Final = 256
"""Folders named in one survey as to be listed; the next one names more."""


class FolderSum(NamedTuple):
    """What lies directly in one folder, by its listing."""

    total_bytes: int
    here_bytes: int
    """Of it in blocks that the listing places on this node."""
    folders: tuple[int, ...]
    """Inodes of the folders in it."""
    example: tuple[int, int] | None
    """(block id, bytes) of one block that the listing places on this node."""


class Survey(NamedTuple):
    """One data set."""

    total_bytes: int
    here_bytes: int
    whole: bool
    """Every folder has been listed."""
    to_list: tuple[int, ...]
    """Folders to list: never listed, or too long ago; the first MAX_UNLISTED."""
    example: tuple[int, int] | None


class Totals:
    """Sums of folders. One thread at a time."""

    def __init__(self, *, max_folders: int = MAX_FOLDERS) -> None:
        self._max_folders = max_folders
        self._sums: dict[int, tuple[Hashable, FolderSum]] = {}

    def forget(self) -> None:
        """Sum up everything again: this node's block workers are others."""
        self._sums.clear()

    def survey(
        self,
        top: int,
        *,
        key_of: Callable[[int], Hashable | None],
        is_old: Callable[[Hashable], bool],
        read: Callable[[int], FolderSum],
        pause: Callable[[], None],
    ) -> Survey:
        """Everything below folder `top`.

        `key_of`: what identifies the listing of a folder, None = never listed. `is_old`: whether such a listing is to
        be made again. `read`: the sum of a listed folder. `pause` is called after each folder.
        """
        total_bytes = here_bytes = 0
        example: tuple[int, int] | None = None
        whole = True
        to_list: list[int] = []
        waiting = [top]
        seen = {top}
        while waiting:
            folder = waiting.pop()
            key = key_of(folder)
            if (key is None or is_old(key)) and len(to_list) < MAX_UNLISTED:
                to_list.append(folder)
            if key is None:
                whole = False
                continue
            found = self._sum_of(folder, key, read)
            total_bytes += found.total_bytes
            here_bytes += found.here_bytes
            example = example or found.example
            for below in found.folders:
                # A loop of folders, which only an impossible listing can have, must not go on for ever.
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
            pause()
        return Survey(total_bytes, here_bytes, whole, tuple(to_list), example)

    def _sum_of(self, folder: int, key: Hashable, read: Callable[[int], FolderSum]) -> FolderSum:
        remembered = self._sums.get(folder)
        if remembered is not None and remembered[0] == key:
            return remembered[1]
        found = read(folder)
        if len(self._sums) >= self._max_folders:
            self._sums.clear()
        self._sums[folder] = (key, found)
        return found
