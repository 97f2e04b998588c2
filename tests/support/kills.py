"""Kill the parts of a mount under load, prove each kill, and say how long readers waited for it."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fusecache.errors import FusecacheError
from tests.support.readers import Load, Report
from tests.t4_mount.live_mount import LiveMount, eventually

CALLS_BETWEEN = 300
"""At most so many calls of all readers pass between two kills."""

PARTS = ("worker", "agent", "gate")
HEALTHY_S = 1.5
"""A part that lives for so long has not died at its start: its kill counts as no crash
(fusecache.kernel.supervisor.restart_policy
says 1 s)."""


class Killed(NamedTuple):
    """One kill that took place."""

    part: str
    pid: int
    """Of the process that is gone."""
    at_s: float
    """Monotonic clock of the machine."""
    back_s: float
    """Seconds until another process had taken its place and was ready."""


def runs(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(mount: LiveMount, part: str) -> Killed:
    """SIGKILL one part; returns once it is gone, counted as one restart, and replaced. AssertionError otherwise."""
    before = mount.parts()[part]
    assert before.pid is not None, f"{part} does not run"
    pid = before.pid
    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(pid), f"{part} is gone")

    def replaced() -> bool:
        try:
            now = mount.parts()[part]
        except FusecacheError:  # it is the agent that answers
            return False
        return now.restarts == before.restarts + 1 and now.pid not in (None, pid) and now.ready

    eventually(replaced, f"{part} runs again")
    return Killed(part, pid, at_s, time.monotonic() - at_s)


def kill_workers(mount: LiveMount, load: Load, kills: int, rng: random.Random) -> list[Killed]:
    """SIGKILL workers by chance at moments by chance while `load` reads."""
    workers = sorted(part for part in mount.parts() if part.startswith("worker"))
    done = []
    for _ in range(kills):
        load.wait_for_calls(rng.randrange(1, CALLS_BETWEEN))
        done.append(kill(mount, rng.choice(workers)))
    load.wait_for_calls(CALLS_BETWEEN)
    return done


def kill_parts(
    mount: LiveMount, load: Load, parts: Sequence[str], kills: int, every_s: float, rng: random.Random
) -> list[Killed]:
    """SIGKILL parts of these kinds by chance while `load` reads, one every `every_s` seconds on average."""
    workers = sorted(part for part in mount.parts() if part.startswith("worker"))
    done = []
    due_s = time.monotonic()
    for _ in range(kills):
        due_s += every_s * rng.uniform(0.5, 1.5)
        time.sleep(max(HEALTHY_S, due_s - time.monotonic()))
        load.wait_for_calls(rng.randrange(1, CALLS_BETWEEN))
        part = rng.choice(parts)
        done.append(kill(mount, rng.choice(workers) if part == "worker" else part))
    load.wait_for_calls(CALLS_BETWEEN)
    return done


def pauses(report: Report, kills: Sequence[Killed]) -> list[float]:
    """For each kill the longest call that was in progress then or began before the part was back, in seconds."""
    return [
        max(
            (
                call.took_s
                for call in report.slow
                if call.started_s < killed.at_s + killed.back_s and call.started_s + call.took_s > killed.at_s
            ),
            default=0.0,
        )
        for killed in kills
    ]


def distribution(values: Sequence[float]) -> str:
    """Smallest, median, 90 %, 99 % and largest, in seconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return (
        f"min {min(values):.3f} s, median {cuts[49]:.3f} s, 90 % {cuts[89]:.3f} s, 99 % {cuts[98]:.3f} s, "
        f"max {max(values):.3f} s"
    )
