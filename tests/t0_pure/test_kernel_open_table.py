"""How an open inode is read stays the same from its first open to its last release, also over a gate's death."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.gate import open_table
from fusecache.kernel.gate.open_table import (
    CLOSED_S,
    HEAD_BYTES,
    MOST_CLOSED,
    ORDINARY,
    PASSTHROUGH,
    OpenTable,
    TableFull,
)
from fusecache.kernel.gate.spin import MOST_SHARE, WINDOW_S, Spin
from fusecache.kernel.wire import RESEND_BIT

ROW_BYTES = 32


def buffer(rows: int = 8) -> bytearray:
    return bytearray(HEAD_BYTES + rows * ROW_BYTES)


def test_the_backing_id_outlives_the_last_release_for_a_while() -> None:
    table = OpenTable(buffer())
    row = table.first_open(7, PASSTHROUGH, 3, unique=1)
    table.open(row, unique=2)
    table.release(7, 3, now_s=10.0)
    assert table.expired(1000.0) == []
    table.release(7, 4, now_s=20.0)
    assert table.expired(20.0 + CLOSED_S / 2) == []
    assert table.rows[7].backing_id == 3
    assert table.expired(20.0 + CLOSED_S) == [3]
    assert 7 not in table.rows


def test_an_inode_opened_again_is_not_given_back() -> None:
    table = OpenTable(buffer())
    row = table.first_open(7, PASSTHROUGH, 3, 1)
    table.release(7, 2, 10.0)
    table.open(row, 3)
    assert table.expired(1e9) == []


def test_an_ordinary_inode_is_forgotten_with_its_last_release() -> None:
    table = OpenTable(buffer())
    row = table.first_open(7, ORDINARY, 0, 1)
    table.open(row, 2)
    table.release(7, 3, 0.0)
    assert 7 in table.rows
    table.release(7, 4, 0.0)
    assert 7 not in table.rows
    table.release(7, 5, 0.0)
    assert table.expired(1e9) == []


def test_a_superseded_backing_is_given_back_with_the_last_release() -> None:
    memory = buffer()
    table = OpenTable(memory)
    row = table.first_open(7, PASSTHROUGH, 3, 1)
    table.open(row, 2)
    assert table.supersede(7) is None
    table = OpenTable(memory)
    assert table.release(7, 3, 0.0) is None
    assert table.release(7, 4, 0.0) == 3
    assert 7 not in table.rows


def test_a_superseded_backing_that_nobody_has_open_is_given_back_at_once() -> None:
    table = OpenTable(buffer())
    table.first_open(7, PASSTHROUGH, 3, 1)
    assert table.release(7, 2, 0.0) is None
    assert table.supersede(7) == 3
    assert table.supersede(7) is None
    table.first_open(7, ORDINARY, 0, 3)
    assert table.supersede(7) is None
    assert 7 in table.rows


def test_at_most_so_many_closed_ones_are_kept_the_newest() -> None:
    table = OpenTable(buffer(MOST_CLOSED + 10))
    for inode in range(MOST_CLOSED + 3):
        table.first_open(inode, PASSTHROUGH, inode + 1, inode)
        table.release(inode, inode, 1.0)
    assert table.expired(1.0) == [1, 2, 3]
    assert len(table.closed) == MOST_CLOSED


def test_rows_are_used_again_and_their_end_is_an_error() -> None:
    table = OpenTable(buffer(2))
    table.first_open(1, ORDINARY, 0, 1)
    table.first_open(2, ORDINARY, 0, 2)
    with pytest.raises(TableFull):
        table.first_open(3, ORDINARY, 0, 3)
    table.release(1, 4, 0.0)
    table.first_open(3, ORDINARY, 0, 5)


def test_a_request_that_was_applied_before_the_gate_died_is_not_counted_again() -> None:
    memory = buffer()
    table = OpenTable(memory)
    table.first_open(7, PASSTHROUGH, 3, unique=40)
    assert not table.was_applied(40)
    after = OpenTable(memory)
    assert after.was_applied(40 | RESEND_BIT)
    assert not after.was_applied(38 | RESEND_BIT)
    after.open(after.rows[7], 42)
    assert OpenTable(memory).was_applied(42 | RESEND_BIT)
    after.release(7, 41, 0.0)
    assert OpenTable(memory).was_applied(41 | RESEND_BIT)


@pytest.mark.parametrize("content", [b"\xff" * 200, b"#CO" + bytes(197), bytes(HEAD_BYTES)])
def test_memory_that_is_no_table_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="table"):
        OpenTable(bytearray(content))


steps = st.lists(
    st.tuples(st.sampled_from(["open", "release", "expire", "forget", "die"]), st.integers(1, 6), st.booleans()),
    max_size=120,
)


@given(steps)
def test_a_gate_that_starts_again_knows_what_the_one_before_it_knew(actions: list[tuple[str, int, bool]]) -> None:
    memory = buffer(6)
    table = OpenTable(memory)
    opens: dict[int, int] = {}
    modes: dict[int, int] = {}
    registered: dict[int, int] = {}
    superseded: set[int] = set()
    now_s = 0.0
    for unique, (action, inode, passthrough) in enumerate(actions, 1):
        now_s += 7.0
        if action == "open":
            row = table.rows.get(inode)
            if row is None:
                mode = PASSTHROUGH if passthrough else ORDINARY
                backing_id = unique if passthrough else 0
                table.first_open(inode, mode, backing_id, unique)
                superseded.discard(inode)
                if passthrough:
                    registered[inode] = backing_id
                modes[inode] = mode
            else:
                assert not opens.get(inode) or row.mode == modes[inode]
                table.open(row, unique)
                modes[inode] = row.mode
            opens[inode] = opens.get(inode, 0) + 1
        elif action == "release" and opens.get(inode):
            opens[inode] -= 1
            gone = table.release(inode, unique, now_s)
            if gone is not None:
                assert not opens[inode]
                assert inode in superseded
                assert registered.pop(inode) == gone
        elif action == "expire":
            for backing_id in table.expired(now_s):
                owner = next(inode for inode, known in registered.items() if known == backing_id)
                assert not opens.get(owner)
                del registered[owner]
        elif action == "forget":
            forgotten = table.supersede(inode)
            assert forgotten is None or (not opens.get(inode) and registered.pop(inode) == forgotten)
            if inode in registered:
                superseded.add(inode)
        elif action == "die":
            table = OpenTable(memory)
        assert {known: row.opens for known, row in table.rows.items() if row.opens} == {
            known: count for known, count in opens.items() if count
        }
        assert {known: row.backing_id for known, row in table.rows.items() if row.mode == PASSTHROUGH} == registered
    assert sorted(table.expired(now_s + 2 * CLOSED_S)) == sorted(
        backing_id for inode, backing_id in registered.items() if not opens.get(inode)
    )


def test_the_whole_table_fits_what_the_gate_maps() -> None:
    assert open_table.TABLE_BYTES == HEAD_BYTES + open_table.MOST_ROWS * ROW_BYTES


def test_spinning_ends_after_the_last_request_and_when_its_share_is_spent() -> None:
    spin = Spin(50)
    assert spin.until_s(last_request_s=10.0, now_s=10.00001) == pytest.approx(10.00005)
    assert spin.until_s(10.0, 10.0001) == 0.0
    spin.spent(WINDOW_S * MOST_SHARE)
    assert spin.until_s(10.001, 10.001) == 0.0
    later = 10.0 + 2 * WINDOW_S
    assert spin.until_s(later, later) > later
    assert spin.spent_s == pytest.approx(WINDOW_S * MOST_SHARE)


def test_spinning_is_off_with_zero() -> None:
    assert Spin(0).until_s(10.0, 10.0) == 0.0
