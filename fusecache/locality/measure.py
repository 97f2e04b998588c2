"""How many bytes of each data set lie on this node: from names of block files to sums. Pure.

A block file's name is its block id, a block id contains its file's id (`alluxio.model`), and the metadata knows the
file: its folder, hence its data sets, and the length of each of its blocks. `HeldBlocks` remembers what it found out
about a block, so that a measurement looks up only names that it has not seen: a node with 650,000 blocks has some
hundred new ones between two measurements.

    held.begin(again=..., everything=...)
    held.add(names, place, size_of)      as often as there are names, some hundred at a time
    held.finish() -> bytes of each data set

What vanished between two measurements is simply not named in the second one. It does not read folders or the metadata
(the caller gives both), and it does not know which block worker a file belongs to: a block counts once, however many
folders have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from fusecache.alluxio.model import FILE_SEQUENCE, MAX_ID, file_id_of
from fusecache.locality.block_table import MET, UNKNOWN, BlockTable

MAX_REMEMBERED: Final = 2_000_000
"""Blocks remembered, 17 bytes each. Further ones are looked up in every measurement: slower, and as right unless two
block workers of one node hold the same of them."""

_NOBODYS: Final = 0
"""Remembered of a block without a data set of ours, or whose file is unknown or not whole."""

_KINDS_BITS: Final = 16
_LAST_BLOCK: Final = (MAX_ID & ~FILE_SEQUENCE) - 2
"""Of the last container whose file id is accepted."""

_LONGEST: Final = 1 << 48
_KIND_MASK: Final = (1 << _KINDS_BITS) - 1


class Place(NamedTuple):
    """Where a block belongs."""

    datasets: int
    """Bit n is set when it belongs to data set n."""
    length: int
    """Bytes of the block: the last one of a file is shorter than the block size."""


def block_id_of_name(name: bytes) -> int | None:
    """The block id that a file name is, or None when it is none: other files may lie there too."""
    if not name.isdigit() or len(name) > 19 or (name[0] == 0x30 and len(name) > 1):
        return None
    block_id = int(name)
    # The last sequence number of a container is the file itself, never a block.
    return block_id if block_id <= _LAST_BLOCK and block_id & FILE_SEQUENCE != FILE_SEQUENCE else None


def inode_of_block(block_id: int) -> int:
    """Inode of the file that a block belongs to: file id + 1."""
    return file_id_of(block_id) + 1


def block_length(block_id: int, file_length: int, block_size: int) -> int:
    """Bytes of a block of a file; 0 when the file has no such block."""
    offset = (block_id & FILE_SEQUENCE) * block_size
    return max(0, min(block_size, file_length - offset))


class HeldBlocks:
    """See the module. One thread at a time."""

    def __init__(self, datasets: int, *, max_remembered: int = MAX_REMEMBERED, table: BlockTable | None = None) -> None:
        """`datasets`: how many there are."""
        self._datasets = datasets
        self._max_remembered = max_remembered
        self._table = table if table is not None else BlockTable()
        """Block -> its length and kind in one number."""
        self._kinds: list[int] = []
        """Sets of data sets (bits) that blocks were found to belong to; a block remembers an index + 1."""
        self._kind_numbers: dict[int, int] = {}
        self._sums: list[int] = []
        self._again = self._everything = False

    def begin(self, *, again: bool = False, everything: bool = False) -> None:
        """A measurement begins. `again`: blocks that belonged to nobody are looked up again (more is listed by now);
        `everything`: all are (files may have been replaced or moved)."""
        self._table.begin_round()
        self._sums = [0] * len(self._kinds)
        self._again, self._everything = again, everything

    def add(
        self, names: Iterable[bytes], place: Callable[[int], Place | None], size_of: Callable[[bytes], int | None]
    ) -> None:
        """Names of one folder. `place` tells where a block belongs; `size_of` the bytes of the regular file of that
        name, None when there is none: a file counts when it has exactly the block's length."""
        meet = self._table.meet
        for name in names:
            block_id = block_id_of_name(name)
            if block_id is None:
                continue
            packed = meet(block_id)
            if packed == MET:
                continue  # counted in another folder
            if packed == UNKNOWN or self._everything or (packed == _NOBODYS and self._again):
                known = packed != UNKNOWN
                packed = self._look_up(block_id, name, place, size_of)
                if known or len(self._table) < self._max_remembered:
                    self._table.put(block_id, packed)
            if packed != _NOBODYS:
                self._sums[(packed & _KIND_MASK) - 1] += packed >> _KINDS_BITS

    def finish(self) -> tuple[int, ...]:
        """Bytes of each data set."""
        self._table.keep_marked()
        sums = [0] * self._datasets
        for datasets, held_bytes in zip(self._kinds, self._sums, strict=True):
            for number in range(self._datasets):
                if datasets >> number & 1:
                    sums[number] += held_bytes
        return tuple(sums)

    def __len__(self) -> int:
        return len(self._table)

    def _look_up(
        self,
        block_id: int,
        name: bytes,
        place: Callable[[int], Place | None],
        size_of: Callable[[bytes], int | None],
    ) -> int:
        found = place(block_id)
        if found is None or not found.datasets or not 0 < found.length < _LONGEST or size_of(name) != found.length:
            return _NOBODYS
        return found.length << _KINDS_BITS | self._kind_number(found.datasets)

    def _kind_number(self, datasets: int) -> int:
        """Index + 1 of a set of data sets."""
        number = self._kind_numbers.get(datasets)
        if number is None:
            self._kinds.append(datasets)
            self._sums.append(0)
            number = self._kind_numbers[datasets] = len(self._kinds)
        return number
