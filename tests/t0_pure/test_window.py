"""FetchWindow: what one read makes us fetch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.prefetch.window import FIRST_WINDOW_BYTES, GRAIN_BYTES, Fetch, FetchWindow

MIB = 1 << 20


def test_window_small_block_is_fetched_whole() -> None:
    window = FetchWindow(110 << 10, 4 * MIB)
    assert window.fetch_for(5000, 9000) == Fetch(0, 110 << 10, sequential=False)


def test_window_random_reads_are_rounded_to_the_grain() -> None:
    window = FetchWindow(64 * MIB, 4 * MIB)
    assert window.fetch_for(10 * MIB + 4096, 10 * MIB + 8192) == Fetch(
        10 * MIB, 10 * MIB + GRAIN_BYTES, sequential=False
    )


def test_window_sequential_reads_double_up_to_the_unit() -> None:
    window = FetchWindow(64 * MIB, 4 * MIB)
    position, sizes = 0, []
    for _ in range(5):
        fetch = window.fetch_for(position, position + 131072)
        assert fetch.start == position
        assert fetch.sequential
        sizes.append(fetch.end - fetch.start)
        position = fetch.end
    assert sizes == [FIRST_WINDOW_BYTES, 2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]


def test_window_several_sequential_readers_are_followed_at_once() -> None:
    window = FetchWindow(64 * MIB, 4 * MIB)
    first = window.fetch_for(0, 4096)
    other = window.fetch_for(32 * MIB, 32 * MIB + 4096)
    assert not other.sequential
    assert window.fetch_for(first.end, first.end + 4096).end - first.end == 2 * FIRST_WINDOW_BYTES
    assert window.fetch_for(other.end, other.end + 4096).sequential


@given(
    length=st.integers(1, 64 * MIB),
    unit=st.sampled_from([64 << 10, MIB, 4 * MIB]),
    reads=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 2 * MIB)), max_size=30),
)
def test_window_always_covers_the_first_byte_and_stays_in_the_block(
    length: int, unit: int, reads: list[tuple[float, int]]
) -> None:
    window = FetchWindow(length, unit)
    for where, size in reads:
        start = int(where * length)
        fetch = window.fetch_for(start, min(length, start + size))
        assert 0 <= fetch.start <= start < fetch.end <= length
