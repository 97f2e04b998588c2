"""Threshold, repeat limit, secrets, cutting."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from fusecache import logs
from tests.support import log_noise
from tests.support.clocks import MovedClock


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def stream(clock: MovedClock) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.level
    target = io.StringIO()
    logs.configure("info", "json", stream=target, clock=clock)
    yield target
    for handler in [handler for handler in root.handlers if type(handler).__module__ == logs.__name__]:
        root.removeHandler(handler)
    root.setLevel(before)
    logs.set_level("info")
    root.setLevel(before)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_event_is_one_json_line_with_level_logger_and_time(stream: io.StringIO) -> None:
    structlog.get_logger("fusecache.x").info("mounted", path="/mnt")
    (event,) = events(stream)
    assert (event["event"], event["level"], event["logger"], event["path"]) == (
        "mounted",
        "info",
        "fusecache.x",
        "/mnt",
    )
    assert event["timestamp"].endswith("Z")


def test_set_level_reaches_a_logger_that_exists(stream: io.StringIO) -> None:
    log = structlog.get_logger("x")
    log.debug("first")
    logs.set_level("debug")
    log.debug("second")
    logs.set_level("error")
    log.warning("third")
    log.error("fourth")
    assert [event["event"] for event in events(stream)] == ["second", "fourth"]
    assert logs.level() == "error"


def test_repeated_failure_passes_once_per_interval_with_a_count(stream: io.StringIO, clock: MovedClock) -> None:
    log = structlog.get_logger("x")
    for attempt in range(100):
        log.warning("disk failed", attempt=attempt)
        log.warning("other")
    clock.sleep(logs.REPEAT_S)
    log.warning("disk failed", attempt=100)
    seen = [(event["event"], event.get("suppressed")) for event in events(stream)]
    assert seen == [("disk failed", None), ("other", None), ("disk failed", 99)]


def test_repeated_info_passes_each_time(stream: io.StringIO) -> None:
    for mountpoint in ("/a", "/b"):
        structlog.get_logger("x").info("mounted", mountpoint=mountpoint)
    assert [event["mountpoint"] for event in events(stream)] == ["/a", "/b"]


def test_repeat_limit_remembers_a_bounded_number_of_kinds(stream: io.StringIO) -> None:
    log = structlog.get_logger("x")
    log.warning("first")
    for number in range(logs.MAX_KINDS):
        log.warning(f"kind {number}")
    log.warning("first")
    assert sum(event["event"] == "first" for event in events(stream)) == 2


def test_secret_is_hidden(stream: io.StringIO) -> None:
    structlog.get_logger("x").info("login", password="hunter2", api_token="t0ps3cret", user="alice")
    assert "hunter2" not in stream.getvalue()
    assert "t0ps3cret" not in stream.getvalue()
    assert events(stream)[0]["user"] == "alice"


def test_long_text_is_cut_and_says_so(stream: io.StringIO) -> None:
    structlog.get_logger("x").warning("refused", reason="y" * 1000, failure=ValueError("z" * 1000))
    (event,) = events(stream)
    assert event["reason"] == "y" * logs.MAX_TEXT + f"... ({1000 - logs.MAX_TEXT} more)"
    assert event["failure"].startswith("ValueError: zzz")
    assert len(event["failure"]) < 300


def test_bytes_and_control_characters_become_readable(stream: io.StringIO) -> None:
    structlog.get_logger("x").info("name", name=b"caf\xe9", path="a\nb\x1b[31m")
    (event,) = events(stream)
    assert (event["name"], event["path"]) == ("caf\\xe9", "a\\x0ab\\x1b[31m")


def test_standard_logging_takes_the_same_way(stream: io.StringIO, expected_logs: log_noise.Declare) -> None:
    expected_logs(r"grpc.*lost", count=1)  # pytest captures `logging` as well
    logging.getLogger("grpc").warning("lost\nline two")
    (event,) = events(stream)
    assert (event["event"], event["level"], event["logger"]) == ("lost\\x0aline two", "warning", "grpc")


def test_exception_is_one_event_with_its_traceback(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        structlog.get_logger("x").exception("handler failed")
    (event,) = events(stream)
    assert "RuntimeError: boom" in event["exception"]


def test_stream_that_can_not_be_written_fails_nobody(stream: io.StringIO) -> None:
    stream.close()
    structlog.get_logger("x").error("nobody reads this")


def test_console_form_is_text(clock: MovedClock, stream: io.StringIO) -> None:
    logs.configure("info", "console", stream=stream, clock=clock)
    structlog.get_logger("x").warning("disk failed", path="/mnt")
    assert "[warning  ] disk failed" in stream.getvalue()
    assert "path=/mnt" in stream.getvalue()


def test_auto_form_off_a_terminal_is_json(clock: MovedClock, stream: io.StringIO) -> None:
    logs.configure("info", "auto", stream=stream, clock=clock)
    structlog.get_logger("x").info("hello")
    assert events(stream)[0]["event"] == "hello"
