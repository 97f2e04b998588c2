"""Log lines of supervisor and gate: one JSON object each, repeated failures counted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusecache.kernel import log as kernel_log
from fusecache.kernel.log import MAX_TEXT, REPEAT_S, Log

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def pipe() -> Iterator[tuple[int, Lines]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def lines() -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
        except BlockingIOError:
            return []

    yield writer, lines
    os.close(reader)
    os.close(writer)


def test_a_line_has_the_fields_of_the_other_logs(pipe: tuple[int, Lines]) -> None:
    Log("gate", descriptor=pipe[0]).info("worker gone", index=1, why=OSError("x\ny"))
    (line,) = pipe[1]()
    stamp = line.pop("timestamp")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", stamp)
    assert line == {
        "level": "info", "logger": "gate", "event": "worker gone", "index": 1, "why": "OSError('x\\ny')"
    }  # fmt: skip


def test_lines_below_the_level_are_left_out(pipe: tuple[int, Lines]) -> None:
    log = Log("gate", "warning", descriptor=pipe[0])
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line["event"] for line in pipe[1]()] == ["c", "d"]


def test_a_failure_that_repeats_is_counted(pipe: tuple[int, Lines], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0  # a sum that is exact
    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: now_s)
    log = Log("gate", descriptor=pipe[0])
    for _ in range(5):
        log.warning("full", disk="a")
        log.info("step")
    assert [line["event"] for line in pipe[1]()] == ["full", *["step"] * 5]
    now_s += REPEAT_S
    log.warning("full", disk="b")
    (line,) = pipe[1]()
    assert (line["suppressed"], line["disk"]) == (4, "b")


def test_long_texts_are_cut(pipe: tuple[int, Lines]) -> None:
    Log("gate", descriptor=pipe[0]).info("said", text="x" * (MAX_TEXT + 7))
    assert pipe[1]()[0]["text"] == "x" * MAX_TEXT + "... (7 more)"


def test_a_stream_that_is_gone_loses_lines_only() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        Log("gate", descriptor=writer).error("nobody reads this")
    finally:
        os.close(writer)
