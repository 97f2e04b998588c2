"""What holds for every test: quiet logs, nothing left behind, stacks on a signal, time per level.

Not here: clusters and mounts (tests/support), and anything that only one level needs.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.support import leftovers, log_noise

LEVEL_BUDGET_S = {
    "t0_pure": 60,
    "t1_rpc": 90,
    "t2_cache": 60,
    "t3_operations": 60,
    "t4_mount": 90,
    "t5_daemon": 90,
    "faults": 90,
    "contract": 60,
    "real": 600,
}
"""Seconds a level may take; printed at the end, so that a level that grows is seen. Their sum without `real`
keeps `make test` under ten minutes."""

EXPECTATIONS = pytest.StashKey[list[log_noise.Expectation]]()
LEVEL_TIME_S = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    """`kill -USR1` on a test run that hangs prints every thread's stack."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell without job control: children would ignore SIGINT too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[LEVEL_TIME_S] = {}


@pytest.fixture
def expected_logs(request: pytest.FixtureRequest) -> log_noise.Declare:
    """Declare noise that belongs to the test: `expected_logs(r"pattern", count=1)` (None = once or more; `optional`:
    it may also stay away)."""
    expectations: list[log_noise.Expectation] = []
    request.node.stash[EXPECTATIONS] = expectations

    def declare(pattern: str, *, count: int | None = None, optional: bool = False) -> None:
        expectations.append(log_noise.Expectation(pattern, count, optional))

    return declare


@pytest.fixture(autouse=True)
def logs_through_the_standard_library() -> Iterator[None]:
    """Send structlog events to `logging`, where pytest captures them per test."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    yield
    structlog.reset_defaults()
    # A test of the log set-up itself may have added handlers that write to a stream of that test only.
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a thread, child process, open descriptor or mount."""
    before = leftovers.take(tmp_path_factory.getbasetemp())
    yield
    left = leftovers.wait_until_gone(before)
    assert not left, "left behind by the test:\n" + "\n".join(left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """After teardown, look for warnings, errors and tracebacks that the test did not declare."""
    report = yield
    level_time_s = item.config.stash[LEVEL_TIME_S]
    level = level_of(item.path)
    level_time_s[level] = level_time_s.get(level, 0.0) + call.duration
    if report.when == "teardown" and report.passed:
        problems = log_noise.check(report.sections, item.stash.get(EXPECTATIONS, []))
        if problems:
            report.outcome = "failed"
            report.longrepr = "log noise:\n" + "\n".join(problems)
    return report


def level_of(path: Path) -> str:
    """The folder below tests/ that a test lies in."""
    relative = path.relative_to(Path(__file__).parent)
    return relative.parts[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line per level: seconds used of its budget."""
    terminalreporter.section("time per level")
    for level, used_s in config.stash[LEVEL_TIME_S].items():
        budget_s = LEVEL_BUDGET_S[level]
        over = "  OVER BUDGET" if used_s > budget_s else ""
        terminalreporter.write_line(f"{level:<14} {used_s:6.1f} s of {budget_s} s{over}")
