"""The one line between a mount's process and its parent."""

from __future__ import annotations

import os

import pytest

from fusecache.kernel.ready_pipe import MAX_LINE, ReadyPipe, Report, parse_report, read_report


def test_ready_is_read_as_ready() -> None:
    read_end, write_end = os.pipe()
    pipe = ReadyPipe(write_end)
    pipe.ready()
    pipe.error(3, "too late: only the first word counts")
    assert read_report(read_end) == Report(True, 0, "")
    os.close(read_end)


def test_error_is_read_with_code_and_one_line() -> None:
    read_end, write_end = os.pipe()
    ReadyPipe(write_end).error(6, "no master\nof m1:19998   answers")
    assert read_report(read_end) == Report(False, 6, "no master of m1:19998 answers")
    os.close(read_end)


def test_error_of_any_length_fits_the_pipe() -> None:
    read_end, write_end = os.pipe()
    ReadyPipe(write_end).error(1, "é" * 10_000)
    report = read_report(read_end)
    os.close(read_end)
    assert report is not None
    assert len(report.error) < MAX_LINE


def test_death_without_a_word_is_none() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert read_report(read_end) is None
    os.close(read_end)


def test_parent_that_is_gone_is_no_error_of_the_child() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ReadyPipe(write_end).ready()


def test_without_a_descriptor_nothing_is_said() -> None:
    ReadyPipe(None).ready()


@pytest.mark.parametrize("line", [b"\n", b"read\n", b"error\n", b"error x y\n", b"ready now\n", b"\xff\n"])
def test_line_of_no_known_form_is_none(line: bytes) -> None:
    assert parse_report(line) is None
