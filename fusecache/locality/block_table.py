"""A number for each of many blocks, in 16 bytes a block: a dict of ints takes 110. Pure.

Two sorted arrays, and a small dict of what was put in since; the dict is merged into the arrays when it is full. A node
that holds ImageNet in single-block files has 1.3 million blocks, and this in each mount's process.

Beside its number each block has a mark of the current round: `keep_marked` drops those without.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import compress
from typing import Final

YOUNG: Final = 1 << 16
"""Blocks in the dict before it is merged: sorting them keeps the interpreter for about 15 ms."""

PIECE: Final = 1 << 16
"""Blocks copied at a time: nothing here keeps the interpreter from other threads for longer than that."""


UNKNOWN: Final = -1
MET: Final = -2
"""What `meet` tells instead of a number."""


class BlockTable:
    """Block id -> number, both of 64 bits. One thread at a time."""

    def __init__(self, *, young: int = YOUNG) -> None:
        self._ids = array("Q")
        self._numbers = array("Q")
        self._marks = bytearray()
        self._young: dict[int, int] = {}
        """All of them are marked: they were put in by the current round."""
        self._most_young = young

    def __len__(self) -> int:
        return len(self._ids) + len(self._young)

    def begin_round(self) -> None:
        """Nothing is marked."""
        self._merge()
        self._marks = bytearray(len(self._ids))

    def meet(self, block_id: int) -> int:
        """Mark a block and tell its number. UNKNOWN: it is not there, or has 0 and was met before. MET: this round met
        it before."""
        # One call a block, because a scan makes a million of them.
        position = bisect_left(self._ids, block_id)
        if position < len(self._ids) and self._ids[position] == block_id:
            number = self._numbers[position]
            if self._marks[position]:
                return MET if number else UNKNOWN
            self._marks[position] = 1
            return number
        return MET if self._young and self._young.get(block_id) else UNKNOWN

    def put(self, block_id: int, number: int) -> None:
        """A block that this round met has a new number."""
        position = bisect_left(self._ids, block_id)
        if position < len(self._ids) and self._ids[position] == block_id:
            self._numbers[position] = number
            return
        self._young[block_id] = number
        if len(self._young) >= self._most_young:
            self._merge()

    def keep_marked(self) -> None:
        """The round is over: what it did not meet is gone."""
        if self._marks.count(1) < len(self._marks):
            ids, numbers = array("Q"), array("Q")
            for start in range(0, len(self._marks), PIECE):
                piece = slice(start, start + PIECE)
                marks = self._marks[piece]
                ids.extend(compress(self._ids[piece], marks))
                numbers.extend(compress(self._numbers[piece], marks))
            self._ids, self._numbers = ids, numbers
            self._marks = bytearray(b"\1") * len(ids)
        self._merge()

    def _merge(self) -> None:
        """Put the young ones where they belong."""
        if not self._young:
            return
        ids, numbers, marks = array("Q"), array("Q"), bytearray()
        start = 0
        for block_id in sorted(self._young):
            position = bisect_left(self._ids, block_id, start)
            if position > start:
                ids += self._ids[start:position]
                numbers += self._numbers[start:position]
                marks += self._marks[start:position]
                start = position
            ids.append(block_id)
            numbers.append(self._young[block_id])
            marks.append(1)
        ids += self._ids[start:]
        numbers += self._numbers[start:]
        marks += self._marks[start:]
        self._ids, self._numbers, self._marks = ids, numbers, marks
        self._young = {}
