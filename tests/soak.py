"""Long runs that no everyday test run has time for: `python -m tests.soak --help`.

    python -m tests.soak --minutes 20
    python -m tests.soak --kills 50 --minutes 3 --open-mode passthrough --part gate
    python -m tests.soak --upgrades 20

mounts a folder, lets eight processes read and check it (whole, pieces, O_DIRECT, mapped, attributes, listings), kills
workers, agent and gate by chance, and prints what the readers saw: errors, wrong bytes, and for each kill the longest
call that overlapped it. Exit code 1 when there was an error or another byte, or when a bar was missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.kills import CALLS_BETWEEN, HEALTHY_S, PARTS, Killed, distribution, kill_parts, pauses, runs
from tests.support.mounting import command
from tests.support.process_tree import descendants
from tests.support.readers import Load, Report
from tests.support.upgrades import Upgrades
from tests.t4_mount.board import Board, Place
from tests.t4_mount.live_mount import eventually
from tests.t4_mount.modes import MODES, OpenMode

SIZES = (0, 1, 4095, 4096, 4097, 20_000, 70_000, 110_000, 300_000, 3_000_000, 20_000_000)
FILES_OF_EACH = 8
SHOWN_ERRORS = 10
PAUSE_P99_S = 0.5
LONGEST_S = 2.0
"""Bars of the pause that a kill costs."""


def soak(
    mode: OpenMode,
    folder: Path,
    *,
    parts: Sequence[str],
    kills: int,
    every_s: float,
    readers: int,
    features: str,
    seed: int,
) -> bool:
    """One run; True when nobody saw anything but pauses, and those within the bars."""
    rng = random.Random(seed)
    with Board(mode, folder) as board:
        source = board.new_source("soak")
        names = [f"f{number}-{size}" for number in range(FILES_OF_EACH) for size in SIZES]
        for name in names:
            (source / name).write_bytes(rng.randbytes(int(name.partition("-")[2])))
        flags = (f"--kernel-features={features}",) if features else ()
        with board.own(source, folder, *flags) as mount:
            place = Place(mount, source, mount.root, max(SIZES) if mode.passthrough else 0)
            place.warm(*names[: len(names) // 2])
            restarts_before = sum(part.restarts for part in mount.parts().values())
            began_s = time.monotonic()
            with Load(mount.root, source, names, processes=readers, seed=seed) as load:
                done = kill_parts(mount, load, parts, kills, every_s, rng)
                report = load.stop()
            took_s = time.monotonic() - began_s
            restarts = sum(part.restarts for part in mount.parts().values()) - restarts_before
    print(
        f"{mode.name}, features {features or 'all'}, seed {seed}: "
        f"{len(done)} kills in {took_s:.0f} s, {readers} readers"
    )
    print(f"  {report.describe()}")
    for kind in parts:
        of_kind = [killed for killed in done if killed.part.startswith(kind)]
        if of_kind:
            print(f"  {kind}, {len(of_kind)} kills")
            print(f"    back after:             {distribution([killed.back_s for killed in of_kind])}")
            print(f"    longest call at a kill: {distribution(pauses(report, of_kind))}")
    within = _within_bars(report, done)
    for text in [*report.errors, *report.wrong][:SHOWN_ERRORS]:
        print(f"  {text}")
    right = not report.errors and not report.wrong and all(report.calls) and restarts == len(done) == kills
    print("  nobody saw anything but pauses" if right else f"  FAILED ({restarts} restarts)", flush=True)
    return right and within


def _within_bars(report: Report, done: Sequence[Killed]) -> bool:
    """Print the pauses of all kills, with the bars, and what calls take that no kill overlaps."""
    found = pauses(report, done)
    p99_s = statistics.quantiles(found, n=100, method="inclusive")[98] if len(found) > 1 else found[0]
    print(f"  longest call at a kill, all {len(found)}: {distribution(found)}")
    overlapping = {
        call
        for call in report.slow
        for killed in done
        if call.started_s < killed.at_s + killed.back_s and call.started_s + call.took_s > killed.at_s
    }
    others_s = [call.took_s for call in report.slow if call not in overlapping]
    print(f"  longest call at no kill: {max(others_s, default=0.0):.3f} s")
    within = p99_s <= PAUSE_P99_S and max(found) <= LONGEST_S
    print(f"  bars (99 % {PAUSE_P99_S} s, longest {LONGEST_S} s): {'met' if within else 'MISSED'}")
    return within


def restart(folder: Path, times: int) -> bool:
    """User report 7: kill the whole mount and start it again, so many times; it is never there twice."""
    source, place = folder / "source", folder / "mnt"
    source.mkdir()
    place.mkdir()
    (source / "file").write_bytes(b"content")
    environment = {
        **os.environ, "FUSECACHE_STATE_DIR": str(folder / "state"), "FUSECACHE_RUNTIME_DIR": str(folder / "run"),
    }  # fmt: skip
    counts = []
    for number in range(times):
        done = subprocess.run(
            [*command(), "mount", "--daemon", str(source), str(place)],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert (place / "file").read_bytes() == b"content"
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        counts.append(sum(line.split()[4] == str(place) for line in lines))
        if number < times - 1:
            pid = int(re.findall(r"process (\d+)", done.stdout)[0])
            parts = [pid, *descendants(pid)]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda parts=parts: not any(map(runs, parts)), "every process of the mount is gone")
    subprocess.run([*command(), "umount", str(place)], env=environment, check=True)
    print(
        f"{times} restarts after kill -9: {max(counts)} line in mountinfo at most, {min(counts)} at least", flush=True
    )
    return set(counts) == {1}


def upgrade(mode: OpenMode, folder: Path, *, times: int, readers: int, features: str, seed: int) -> bool:
    """Take the mount over so many times while others read; True when nobody saw an error or another byte."""
    rng = random.Random(seed)
    # On another file system than the state: block files are then copies, which the kernel may read itself.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fusecache-soak-") as content:
        source = Path(content)
        names = [f"f{number}-{size}" for number in range(FILES_OF_EACH) for size in SIZES]
        for name in names:
            (source / name).write_bytes(rng.randbytes(int(name.partition("-")[2])))
        masked = (f"--kernel-features={features}",) if features else ()
        flags = ("--log-level", "error", *mode.flags, *masked)
        with Upgrades(content, folder, *flags) as mount:
            mount.start()
            done = []
            with Load(mount.mountpoint, source, names, processes=readers, seed=seed) as load:
                for _ in range(times):
                    load.wait_for_calls(CALLS_BETWEEN)
                    at_s = time.monotonic()
                    mount.start()
                    done.append(Killed("mount", mount.pids[0], at_s, time.monotonic() - at_s))
                load.wait_for_calls(CALLS_BETWEEN)
                report = load.stop()
            mount.end()
    print(f"{mode.name}, features {features or 'all'}, seed {seed}: {times} upgrades, {readers} readers")
    print(f"  {report.describe()}")
    print(f"  an upgrade took:            {distribution([killed.back_s for killed in done])}")
    print(f"  longest call at an upgrade: {distribution(pauses(report, done))}")
    for text in [*report.errors, *report.wrong][:SHOWN_ERRORS]:
        print(f"  {text}")
    right = not report.errors and not report.wrong and all(report.calls)
    print("  nobody saw anything but pauses" if right else "  FAILED", flush=True)
    return right


def main() -> int:
    """See the module."""
    modes = [name for name in MODES if name != "classic"]
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Kill or replace parts while others read."
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="for all modes together (default 20)")
    parser.add_argument("--kills", type=int, default=200, help="in each mode (default 200)")
    parser.add_argument("--open-mode", choices=modes, action="append", help="default: no-open and passthrough")
    parser.add_argument("--part", choices=PARTS, action="append", help="what is killed (default: each)")
    parser.add_argument("--kernel-features", default="", help="masked features, e.g. -resend (default: none)")
    parser.add_argument("--readers", type=int, default=8, help="reader processes (default 8)")
    parser.add_argument("--seed", type=int, default=1, help="of contents, moments and victims (default 1)")
    parser.add_argument("--restarts", type=int, default=0, help="instead: kill and start the whole mount so often")
    parser.add_argument("--upgrades", type=int, default=0, help="instead: take the mount over so often, in each mode")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-soak-") as folder:
        if chosen.restarts:
            return 0 if restart(Path(folder), chosen.restarts) else 1
        names = chosen.open_mode or ["no-open", "passthrough"]
        right = True
        for name in names:
            own = Path(folder, name)
            own.mkdir()
            if chosen.upgrades:
                right &= upgrade(
                    MODES[name],
                    own,
                    times=chosen.upgrades,
                    readers=chosen.readers,
                    features=chosen.kernel_features,
                    seed=chosen.seed,
                )
                continue
            right &= soak(
                MODES[name],
                own,
                parts=chosen.part or PARTS,
                kills=chosen.kills,
                every_s=max(HEALTHY_S, chosen.minutes * 60 / len(names) / chosen.kills),
                readers=chosen.readers,
                features=chosen.kernel_features,
                seed=chosen.seed,
            )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
