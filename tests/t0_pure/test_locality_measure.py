"""From names of block files and listings to bytes of data sets."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.alluxio.model import FILE_SEQUENCE, MAX_ID, block_id_of, file_id_of
from fusecache.locality.block_table import MET, UNKNOWN, BlockTable
from fusecache.locality.measure import HeldBlocks, Place, block_id_of_name, block_length, inode_of_block
from fusecache.locality.totals import MAX_UNLISTED, FolderSum, Survey, Totals

BLOCK = 1 << 20
FILE = file_id_of(7 << 24)


@pytest.mark.parametrize(
    ("name", "block_id"),
    [
        (b"117440512", 7 << 24),
        (b"117440513", (7 << 24) + 1),
        (b"16777215", None),  # the file itself
        (b"0", 0),
        (b"007", None),
        (b"", None),
        (b"-1", None),
        (b" 1", None),
        (b"1.tmp", None),
        (b".tmp_blocks", None),
        (b"99999999999999999999", None),
        (str(MAX_ID + 1).encode(), None),
        ("\u0661".encode(), None),
    ],
)
def test_block_id_of_name(name: bytes, block_id: int | None) -> None:
    assert block_id_of_name(name) == block_id


def test_block_belongs_to_the_inode_after_its_file_id() -> None:
    assert [inode_of_block(block_id_of(FILE, index)) for index in (0, 1, 900)] == [FILE + 1] * 3


@pytest.mark.parametrize(("index", "length"), [(0, BLOCK), (1, BLOCK), (2, 5), (3, 0), (FILE_SEQUENCE - 1, 0)])
def test_block_length_last_block_is_shorter(index: int, length: int) -> None:
    assert block_length(block_id_of(FILE, index), 2 * BLOCK + 5, BLOCK) == length


class Node:
    """Block files as a dictionary, and how often the metadata was asked."""

    def __init__(self, places: Mapping[int, Place]) -> None:
        self.places = dict(places)
        self.sizes: dict[bytes, int | None] = {}
        self.asked: list[int] = []

    def place(self, block_id: int) -> Place | None:
        self.asked.append(block_id)
        return self.places.get(block_id)

    def measure(
        self, held: HeldBlocks, *folders: list[bytes], again: bool = False, everything: bool = False
    ) -> list[int]:
        held.begin(again=again, everything=everything)
        for names in folders:
            held.add(names, self.place, self.size_of)
        return list(held.finish())

    def size_of(self, name: bytes) -> int | None:
        block_id = block_id_of_name(name)
        assert block_id is not None
        return self.sizes.get(name, self.places[block_id].length)


def names(*block_ids: int) -> list[bytes]:
    return [b"%d" % block_id for block_id in block_ids]


def test_held_blocks_new_names_alone_are_looked_up_and_gone_ones_count_no_more() -> None:
    node = Node({1: Place(0b01, 100), 2: Place(0b11, 10), 3: Place(0b10, 1), 4: Place(0, 5)})
    held = HeldBlocks(2)
    assert node.measure(held, [*names(1, 2, 4), b".tmp_blocks", b"nonsense"]) == [110, 10]
    assert node.measure(held, names(1, 2, 3, 4)) == [110, 11]
    assert node.asked == [1, 2, 4, 3]
    assert node.measure(held, names(3)) == [0, 1]
    assert len(held) == 1
    assert node.measure(held, []) == [0, 0]


def test_held_blocks_unknown_ones_are_looked_up_again_when_more_is_listed() -> None:
    node = Node({})
    held = HeldBlocks(1)
    assert node.measure(held, names(1)) == [0]
    node.places[1] = Place(1, 7)
    assert node.measure(held, names(1)) == [0]
    assert node.measure(held, names(1), again=True) == [7]
    # Its file was moved to another data set, or is gone: seen when everything is placed anew.
    del node.places[1]
    assert node.measure(held, names(1), again=True) == [7]
    assert node.measure(held, names(1), everything=True) == [0]


def test_held_blocks_file_that_is_not_whole_or_no_file_counts_nothing() -> None:
    node = Node({1: Place(1, 7), 2: Place(1, 8)})
    node.sizes = {b"1": 6, b"2": None}
    held = HeldBlocks(1)
    assert node.measure(held, names(1, 2)) == [0]
    node.sizes = {}
    assert node.measure(held, names(1, 2), again=True) == [15]


def test_held_blocks_block_in_two_folders_counts_once() -> None:
    node = Node({1: Place(1, 7)})
    assert node.measure(HeldBlocks(1), names(1), names(1)) == [7]


def test_held_blocks_memory_is_bounded_and_the_sum_is_not() -> None:
    node = Node({number: Place(1, 1) for number in range(1, 101)})
    held = HeldBlocks(1, max_remembered=10)
    for _ in range(2):
        assert node.measure(held, names(*range(1, 101))) == [100]
        assert len(held) == 10
    assert len(node.asked) == 100 + 90


@given(
    st.lists(
        st.tuples(st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)), st.booleans()), min_size=1, max_size=6
    ),
    st.dictionaries(st.integers(1, 12), st.tuples(st.integers(0, 7), st.integers(1, 50))),
)
def test_held_blocks_agree_with_counting_anew(
    rounds: list[tuple[set[int], set[int], bool]], places: dict[int, tuple[int, int]]
) -> None:
    node = Node({block_id: Place(*place) for block_id, place in places.items()})
    held = HeldBlocks(3, table=BlockTable(young=3))
    for first, second, everything in rounds:
        present = first | second
        expected = [
            sum(
                place.length
                for block_id, place in node.places.items()
                if block_id in present and place.datasets >> n & 1
            )
            for n in range(3)
        ]
        assert node.measure(held, names(*first), names(*second), everything=everything) == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1 << 63))), max_size=8), st.integers(1, 9))
def test_block_table_is_a_dictionary_of_what_the_last_round_met(
    rounds: list[list[tuple[int, int]]], young: int
) -> None:
    table = BlockTable(young=young)
    expected: dict[int, int] = {}
    for met in rounds:
        table.begin_round()
        expected_now: dict[int, int] = {}
        for block_id, number in met:
            told = table.meet(block_id)
            if block_id in expected_now:
                assert told == (MET if expected_now[block_id] else UNKNOWN)
            else:
                assert told == expected.get(block_id, UNKNOWN)
                if told == UNKNOWN:
                    table.put(block_id, number)
                    expected_now[block_id] = number
                else:
                    expected_now[block_id] = told
        table.keep_marked()
        expected = expected_now
        assert len(table) == len(expected)
    table.begin_round()
    assert {block_id: table.meet(block_id) for block_id in expected} == expected


# ---- totals ----


class Tree:
    """Listed folders: inode -> (key, own bytes, bytes here, folders)."""

    def __init__(self, folders: Mapping[int, tuple[str, int, int, tuple[int, ...]]]) -> None:
        self.folders = dict(folders)
        self.read: list[int] = []
        self.old: set[str] = set()
        self.pauses = 0

    def survey(self, totals: Totals, top: int = 1) -> Survey:
        def read(inode: int) -> FolderSum:
            self.read.append(inode)
            _, total_bytes, here_bytes, below = self.folders[inode]
            return FolderSum(total_bytes, here_bytes, below, (inode, here_bytes) if here_bytes else None)

        def pause() -> None:
            self.pauses += 1

        return totals.survey(
            top,
            key_of=lambda inode: self.folders[inode][0] if inode in self.folders else None,
            is_old=lambda key: key in self.old,
            read=read,
            pause=pause,
        )


def test_totals_sum_of_all_folders_and_only_new_listings_are_read() -> None:
    tree = Tree(
        {1: ("a", 10, 0, (2, 3)), 2: ("b", 5, 5, ()), 3: ("c", 1, 1, (4,)), 4: ("d", 2, 0, ()), 9: ("z", 99, 0, ())}
    )
    totals = Totals()
    found = tree.survey(totals)
    assert found[:4] == (18, 6, True, ())
    assert found.example in {(2, 5), (3, 1)}
    assert sorted(tree.read) == [1, 2, 3, 4]
    assert tree.pauses == 4
    tree.read.clear()
    tree.folders[2] = ("b2", 6, 0, ())
    assert tree.survey(totals)[:2] == (19, 1)
    assert tree.read == [2]
    totals.forget()
    tree.survey(totals)
    assert len(tree.read) == 1 + 4


def test_totals_unlisted_folder_makes_it_not_whole_and_old_ones_are_to_be_listed() -> None:
    tree = Tree({1: ("a", 10, 0, (2, 3)), 2: ("b", 5, 0, (4,))})
    found = tree.survey(Totals())
    assert (found.total_bytes, found.whole, sorted(found.to_list)) == (15, False, [3, 4])
    tree = Tree({1: ("a", 10, 0, ())})
    tree.old = {"a"}
    found = tree.survey(Totals())
    assert (found.total_bytes, found.whole, found.to_list) == (10, True, (1,))
    assert Tree({}).survey(Totals()) == Survey(0, 0, False, (1,), None)


def test_totals_folders_in_a_circle_end_and_lists_are_bounded() -> None:
    assert Tree({1: ("a", 1, 0, (2,)), 2: ("b", 1, 0, (1,))}).survey(Totals())[:3] == (2, 0, True)
    wide = Tree({1: ("a", 1, 0, tuple(range(2, 2000)))}).survey(Totals())
    assert len(wide.to_list) == MAX_UNLISTED
    many = Tree({1: ("a", 0, 0, tuple(range(2, 50))), **dict.fromkeys(range(2, 50), ("b", 1, 0, ()))})
    totals = Totals(max_folders=10)
    assert many.survey(totals).total_bytes == many.survey(totals).total_bytes == 48
