"""What holds for every test: quiet logs, nothing left behind, stacks on a signal, time per level; a folder for tests
with other users.

Not here: clusters and mounts (tests/support), and anything that only one level needs.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from tests.support import leftovers, log_noise
from tests.support.reachable import python_for_all, reachable  # noqa: F401 - fixtures
from tests.t4_mount.modes import chosen

LEVEL_BUDGET_S = {
    "t0_pure": 60,
    "t1_rpc": 120,
    "t2_cache": 60,
    "t3_operations": 60,
    "t4_mount": 300,
    "t5_daemon": 500,
    "t6_controller": 120,
    "faults": 340,
    "contract": 40,
    "cluster": 900,
    "real": 600,
}
"""Seconds a level's tests may take, one after the other; printed at the end, so that a level that grows is seen. Two
processes share them (most of the time is waiting), so the sum without `cluster` and `real` keeps `make test` under
seven minutes."""

# How long an example takes says how busy the machine is: at load 20 one of 0.2 ms took more than the default's 200.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

EXPECTATIONS = pytest.StashKey[list[log_noise.Expectation]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The open modes in which tests/t4_mount runs."""
    parser.addoption("--open-modes", metavar="NAME,...", help="run the tests of mounts in these open modes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: a test file is one piece of work, and so are all tests of one open mode, which share
    their mounts. Before pytest-xdist reads the marks."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        mode = parameters.get("open_mode")
        item.add_marker(pytest.mark.xdist_group(item.path.name if mode is None else f"open mode {mode.name}"))


def pytest_configure(config: pytest.Config) -> None:
    """`kill -USR1` on a test run that hangs prints every thread's stack."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell without job control: children would ignore SIGINT too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Started by nohup, as CI may be: a mount that is started so does not reload.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Set aside what imports and collection have made, over 100,000 objects: each test ends with a garbage collection,
    and walking them took four fifths of the time of t0_pure. What a test makes is collected as ever."""
    gc.collect()
    gc.freeze()


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
    if report.when == "teardown" and report.passed:
        problems = log_noise.check(report.sections, item.stash.get(EXPECTATIONS, []))
        if problems:
            report.outcome = "failed"
            report.longrepr = "log noise:\n" + "\n".join(problems)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line per level: seconds used of its budget. From the reports, which reach the one process that prints."""
    level_time_s = dict.fromkeys(LEVEL_BUDGET_S, 0.0)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            level_time_s[Path(report.nodeid.partition("::")[0]).parts[1]] += report.duration
    terminalreporter.section("time per level")
    for level, used_s in level_time_s.items():
        if not used_s:
            continue
        modes = chosen(config.getoption("--open-modes")) if level == "t4_mount" else ()
        budget_s = LEVEL_BUDGET_S[level] * max(1, len(modes))
        over = "  OVER BUDGET" if used_s > budget_s else ""
        terminalreporter.write_line(f"{level:<14} {used_s:6.1f} s of {budget_s} s{over}")
