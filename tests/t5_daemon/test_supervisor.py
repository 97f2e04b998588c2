"""The supervisor with the real gate, and stand-ins for agent and workers: one mount's life, kills, and its end.

Every fault is proven before what follows from it is looked at: a killed part is seen to have gone, a slow read to have
been asked for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.kernel import features, probe
from fusecache.kernel.init_message import INIT_EXT, parse_request
from tests.support import stand_in_worker
from tests.support.limits import no_more_descriptors
from tests.support.mounting import is_mounted, needs_fuse
from tests.support.supervised import PACKAGE_FOLDER, WAIT_S, Supervised, runs, until

FEATURES = probe.probe()

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(not FEATURES.usable("mount"), reason=f"no mount(2) here: {FEATURES['mount'].why}"),
]

CONTENT = stand_in_worker.CONTENT
MAX_RSS_KB = 25 << 10
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)

Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts supervised mounts, and takes down what a failed test leaves."""
    with contextlib.ExitStack() as stack:

        def make(*, features: features.Features = FEATURES, wait: bool = True, **fields: Any) -> Supervised:
            mount = stack.enter_context(Supervised(tmp_path, features, **fields))
            mount.start(wait=wait)
            return mount

        yield make


def nothing_is_left(mount: Supervised, pids: list[int]) -> None:
    """No process of it runs, and nothing is mounted."""
    until(lambda: not any(map(runs, pids)), f"all of {pids} have ended")
    assert not is_mounted(mount.mountpoint)


def kill(mount: Supervised, part: str) -> int:
    """SIGKILL one part, and see it gone; its pid."""
    pid: int = mount.parts()[part]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid), f"{part} is dead")
    return pid


def slow_read(mount: Supervised, *, direct: bool = False) -> subprocess.Popen[bytes]:
    """A read of `slow` that a worker holds."""
    (mount.orders / "asked").unlink(missing_ok=True)
    reading = mount.reading("slow", direct=direct)
    until((mount.orders / "asked").exists, "a worker was asked for the slow file")
    return reading


def masked_features(*words: str) -> features.Features:
    """This machine's features under a mask."""
    return features.judge({row.name: features.Observation(row.present, row.why) for row in FEATURES.rows}, words)


def spare_stands_by(mount: Supervised) -> None:
    until(lambda: mount.parts()["spare gate"]["ready"], "the spare gate stands by")


def workers(mount: Supervised) -> list[tuple[str, int, int]]:
    """Name, pid and restarts of each."""
    return [(name, part["pid"], part["restarts"]) for name, part in mount.parts().items() if name.startswith("worker")]


def answer_slow_reads(mount: Supervised) -> None:
    (mount.orders / "go").touch()


def test_a_mount_is_made_once_and_served(start: Start) -> None:
    mount = start()
    assert mount.report == b"ready\n"
    lines = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mount.mountpoint} " in line]
    assert len(lines) == 1
    assert " - fuse.fusecache stand-in,\\040with\\040a\\040comma ro," in lines[0]
    assert "nosuid,nodev" in lines[0]
    assert sorted(os.listdir(mount.mountpoint)) == ["endless", "file", "huge", "poison", "slow"]
    assert mount.read("file").stdout == CONTENT
    with pytest.raises(OSError) as failure:
        (mount.mountpoint / "new").touch()
    assert failure.value.errno == errno.EROFS


def test_a_mount_point_may_have_any_name(tmp_path: Path) -> None:
    """mountinfo escapes them; a supervisor that does not know its own mount would leave it behind."""
    folder = tmp_path / "a b\tc\\040d\nü"
    folder.mkdir()
    with Supervised(folder, FEATURES) as mount:
        mount.start()
        assert mount.report == b"ready\n"
        assert (mount.mountpoint / "file").read_bytes() == CONTENT
        assert mount.status()["device"]
        os.kill(mount.pid, signal.SIGTERM)
        assert mount.ended() == 0
        assert os.listdir(mount.mountpoint) == []


def test_status_tells_parts_features_and_tuning(start: Start) -> None:
    mount = start(read_ahead_bytes=512 << 10, max_background=33, congestion_threshold=99)
    status = mount.status()
    assert [part["name"] for part in status["parts"]] == [
        "supervisor", "gate", "spare gate", "agent", "worker 0", "worker 1",
    ]  # fmt: skip
    until(lambda: all(part["ready"] for part in mount.parts().values()), "all parts are ready")
    assert {row["name"] for row in status["features"]} == set(features.FEATURE_NAMES)
    assert (status["max_background"], status["congestion_threshold"]) == (33, 33)
    told = Path(f"/sys/class/bdi/{status['device']}/read_ahead_kb").read_text().strip()
    assert (status["read_ahead_bytes"], told) == (512 << 10, "512"), "set after INIT's answer, which resets it"
    serving = json.loads((mount.orders / "agent-serving.json").read_text())
    assert {"open_mode": "no-open", "why": "the test says so"}.items() <= serving.items()


def test_only_supervisor_and_gate_have_the_device(start: Start) -> None:
    """Whoever holds it keeps a dead connection alive."""
    mount = start()
    spare_stands_by(mount)
    parts = mount.parts()

    def has_device(pid: int) -> bool:
        folder = Path(f"/proc/{pid}/fd")
        return any(os.readlink(folder / number) == "/dev/fuse" for number in os.listdir(folder))

    assert {name for name, part in parts.items() if has_device(part["pid"])} == {"supervisor", "gate"}


def test_supervisor_and_gate_are_small_and_named(start: Start) -> None:
    mount = start()
    spare_stands_by(mount)
    parts = mount.parts()
    for name in ("supervisor", "gate", "spare gate"):
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{parts[name]['pid']}/status").read_text().splitlines()
        )
        assert int(fields["VmRSS"].split()[0]) <= MAX_RSS_KB, (name, fields["VmRSS"])
    command_line = Path(f"/proc/{mount.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    assert command_line == f"fusecache: supervisor {mount.mountpoint}"[: len(command_line)]
    assert command_line.startswith("fusecache: supervisor ")


@pytest.mark.parametrize("module", ["supervisor", "gate", "probe", "gate_link", "reply_slots"])
def test_what_must_not_die_imports_the_standard_library_only(module: str) -> None:
    code = (
        f"import sys, fusecache.kernel.{module}\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],  # with site packages: an import of one must be seen, not fail
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)},
    )  # fmt: skip
    without = subprocess.run(
        [sys.executable, "-c", code.partition("\n")[2] and "import sys\n" + code.partition("\n")[2]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) - set(without.stdout.split()) == {"fusecache"}


def test_umount_ends_everything_with_0(start: Start) -> None:
    mount = start()
    spare_stands_by(mount)
    pids = mount.pids()
    assert len(pids) == 6
    socket_file = mount.agent_socket
    socket_file.touch()
    subprocess.run(["umount", str(mount.mountpoint)], check=True, timeout=WAIT_S)
    assert mount.ended() == 0
    nothing_is_left(mount, pids)
    assert not socket_file.exists()
    assert mount.events()[-1] == "unmounted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_and_ends_with_0(start: Start, number: signal.Signals) -> None:
    mount = start()
    pids = mount.pids()
    os.kill(mount.pid, number)
    assert mount.ended() == 0
    nothing_is_left(mount, pids)
    assert os.listdir(mount.mountpoint) == []


def test_f17_without_descriptors_a_mount_can_be_ended(start: Start) -> None:
    mount = start()
    pids = mount.pids()
    with no_more_descriptors(mount.pid):
        os.kill(mount.pid, signal.SIGTERM)
        assert mount.ended() == 0
    nothing_is_left(mount, pids)


def test_nothing_that_an_agent_says_ends_the_mount_or_takes_its_descriptors(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """It reads what the network sends. Each `prepared` was answered with a descriptor, which waits with the answer."""
    expected_logs("a message of the agent is not understood")
    expected_logs("the agent is stuck and is replaced", count=1)
    expected_logs("the agent ended, reads go on", count=1)
    mount = start(silent_s=2.0)
    descriptors = Path(f"/proc/{mount.pid}/fd")
    before, agent = len(os.listdir(descriptors)), mount.parts()["agent"]["pid"]
    (mount.orders / "flood").touch()
    until((mount.orders / "flooded").exists, "it has said more than may wait")
    (mount.orders / "flood").unlink()
    assert len(os.listdir(descriptors)) < before + 20
    assert mount.read("file").stdout == CONTENT
    until(lambda: not runs(agent), "it was ended, for it answers nothing")
    assert mount.parts()["supervisor"]["pid"] == mount.pid


def test_a_busy_mount_is_detached_and_said_so(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the mount is busy: detached", count=1)
    mount = start()
    pids = mount.pids()
    held = os.open(mount.mountpoint / "file", os.O_RDONLY)
    try:
        os.kill(mount.pid, signal.SIGTERM)
        assert mount.ended() == 0
        nothing_is_left(mount, pids)
        with pytest.raises(OSError) as failure:
            os.preadv(held, [bytearray(4096)], 0)
        assert failure.value.errno in GONE
    finally:
        with contextlib.suppress(OSError):
            os.close(held)


def test_sigterm_lets_a_read_in_flight_finish(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the mount is busy: detached", count=1)
    mount = start()
    pids = mount.pids()
    reading = slow_read(mount)
    os.kill(mount.pid, signal.SIGTERM)
    until(lambda: not is_mounted(mount.mountpoint), "the mount is detached")
    answer_slow_reads(mount)
    assert reading.communicate(timeout=WAIT_S)[0] == CONTENT[: 64 << 10]
    assert mount.ended() == 0
    nothing_is_left(mount, pids)


def test_a_second_signal_ends_at_once(start: Start, expected_logs: Callable[..., None]) -> None:
    """The read in flight, for which the first one waits, gets an error."""
    expected_logs("the mount is busy: detached", count=1)
    expected_logs("second signal: ending without waiting", count=1)
    mount = start()
    pids = mount.pids()
    reading = slow_read(mount)
    os.kill(mount.pid, signal.SIGTERM)
    until(lambda: not is_mounted(mount.mountpoint), "the mount is detached")
    assert mount.process is not None
    assert mount.process.poll() is None, "it waits for the read in flight"
    os.kill(mount.pid, signal.SIGTERM)
    assert mount.ended(within_s=8) == 0
    reading.communicate(timeout=WAIT_S)
    assert reading.returncode != 0
    nothing_is_left(mount, pids)


def test_sigkill_of_a_worker_costs_a_pause(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("a worker ended", count=1)  # the second one within 10 s is only counted
    mount = start()
    before = mount.parts()
    reading = slow_read(mount)
    for name in ("worker 0", "worker 1"):
        kill(mount, name)
        until(lambda name=name: mount.parts()[name]["ready"], f"{name} is back")
    answer_slow_reads(mount)
    assert reading.communicate(timeout=WAIT_S)[0] == CONTENT[: 64 << 10]
    after = mount.parts()
    assert {after[name]["restarts"] for name in ("worker 0", "worker 1")} == {1}
    assert after["gate"]["pid"] == before["gate"]["pid"]
    assert mount.read("file").stdout == CONTENT


def test_sigkill_of_the_agent_leaves_reads_alone(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the agent ended, reads go on", count=1)
    mount = start()
    until((mount.orders / "agent-serving.json").exists, "the first agent serves")
    (mount.orders / "agent-serving.json").unlink()
    pid = kill(mount, "agent")
    assert mount.read("file").stdout == CONTENT
    until((mount.orders / "agent-serving.json").exists, "the next agent was told that all runs")
    assert json.loads((mount.orders / "agent-serving.json").read_text())["pid"] != pid
    assert mount.parts()["agent"]["restarts"] == 1


def test_sigkill_of_the_gate_puts_reads_in_flight_back(start: Start, expected_logs: Callable[..., None]) -> None:
    if not FEATURES.usable("resend"):
        pytest.skip(FEATURES["resend"].why)
    expected_logs("the gate ended; requests in flight are put back", count=1)
    mount = start()
    spare_stands_by(mount)
    before = workers(mount)
    spare = mount.parts()["spare gate"]["pid"]
    reading = slow_read(mount)
    kill(mount, "gate")
    answer_slow_reads(mount)
    content, said = reading.communicate(timeout=WAIT_S)
    assert content == CONTENT[: 64 << 10], said
    assert mount.read("file").stdout == CONTENT
    gate = mount.parts()["gate"]
    assert (gate["pid"], gate["restarts"]) == (spare, 1), "the one that stood by goes on"
    assert workers(mount) == before, "workers outlive their gate"
    until(lambda: mount.parts()["spare gate"]["ready"], "the next spare gate stands by")
    assert mount.parts()["spare gate"]["pid"] != spare


def test_a_gate_that_dies_before_its_spare_is_there_is_started(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs("the (spare )?gate ended")
    mount = start()
    spare_stands_by(mount)
    before = workers(mount)
    blocker = mount.dies_at_start("gate")
    blocker.touch()
    kill(mount, "spare gate")
    until(lambda: not mount.parts()["spare gate"]["ready"], "none stands by")
    blocker.unlink()
    kill(mount, "gate")
    assert mount.read("file").stdout == CONTENT
    assert workers(mount) == before


def test_the_mount_stays_the_same_mount(start: Start, tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    """User report 2: a bind mount of it, as containers have one, goes on through every kill."""
    expected_logs("a worker ended|the agent ended|the gate ended")
    mount = start()
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["mount", "--bind", str(mount.mountpoint), str(copy)], check=True)
    try:
        before = lines_of(mount.mountpoint, copy)
        assert len(before) == 2
        for part in ("worker 0", "worker 1", "agent", "gate"):
            kill(mount, part)
            until(lambda part=part: mount.parts()[part]["ready"], f"{part} is back")
            assert (copy / "file").read_bytes() == CONTENT
        assert lines_of(mount.mountpoint, copy) == before
    finally:
        subprocess.run(["umount", str(copy)], check=True)


def lines_of(*places: Path) -> list[str]:
    """Their lines in mountinfo, with the mounts' ids."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4] in map(str, places)]


def test_a_killed_reader_is_gone_although_nobody_answers(start: Start) -> None:
    """S40, user report 40."""
    mount = start()
    reading = slow_read(mount, direct=True)
    reading.kill()
    status = Path(f"/proc/{reading.pid}/status").read_text()
    assert not status.partition("State:")[2].lstrip().startswith("Z"), "it waits for its READ, killed or not"
    reading.communicate(timeout=5)
    assert reading.returncode == -signal.SIGKILL
    answer_slow_reads(mount)
    assert mount.read("file").stdout == CONTENT


def test_a_signal_that_does_not_kill_interrupts_no_read(start: Start) -> None:
    """S40: a program with a timer gets its bytes."""
    mount = start()
    program = (
        "import os, signal, sys, mmap\n"
        "ticks = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))\n"
        "signal.siginterrupt(signal.SIGALRM, True)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        "file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
        "buffer = mmap.mmap(-1, 65536)\n"
        "libc_read = __import__('ctypes').CDLL(None, use_errno=True).pread\n"
        "address = __import__('ctypes').addressof(__import__('ctypes').c_char.from_buffer(buffer))\n"
        "got = libc_read(file, __import__('ctypes').c_void_p(address), 65536, 0)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(got, bool(ticks))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(mount.mountpoint / "slow")], stdout=subprocess.PIPE, text=True
    ) as reading:
        until((mount.orders / "asked").exists, "a worker was asked for the slow file")
        asked_s = time.monotonic()
        until(lambda: time.monotonic() - asked_s > 3, "longer than a killed caller would wait")
        assert reading.poll() is None
        answer_slow_reads(mount)
        assert reading.communicate(timeout=WAIT_S)[0] == "65536 True\n"


@pytest.mark.parametrize("mode", ["no-open", "passthrough"])
def test_open_files_outlive_the_gate(start: Start, mode: str, expected_logs: Callable[..., None]) -> None:
    """How an inode is open may not change before its last RELEASE: the next gate knows it from the table."""
    if not FEATURES.usable("passthrough"):
        pytest.skip(FEATURES["passthrough"].why)
    expected_logs("the gate ended", count=1)
    mount = start(mode=mode)
    (mount.orders / "backing").write_bytes(CONTENT)
    held = [os.open(mount.mountpoint / name, os.O_RDONLY) for name in ("file", "huge")]
    try:
        kill(mount, "gate")
        until(lambda: mount.parts()["worker 0"]["ready"], "the next gate serves")
        for descriptor, name in zip(held, ("file", "huge"), strict=True):
            assert os.pread(descriptor, 4096, 8192) == CONTENT[8192:12288]
            with (mount.mountpoint / name).open("rb") as again:
                assert again.read(4096) == CONTENT[:4096], "opened while the first one is still open"
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert mount.read("file").stdout == CONTENT


def test_passthrough_reads_the_backing_file(start: Start) -> None:
    """The instrument of the test above: its bytes do not come from a worker."""
    if not FEATURES.usable("passthrough"):
        pytest.skip(FEATURES["passthrough"].why)
    mount = start(mode="passthrough")
    assert mount.status()["open_mode"] == "passthrough"
    other = bytes(reversed(CONTENT))
    (mount.orders / "backing").write_bytes(other)
    assert (mount.mountpoint / "file").read_bytes() == other


def test_sigkill_of_the_gate_without_resend_is_an_error_and_then_goes_on(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs("the gate ended; requests in flight are answered ECONNABORTED", count=1)
    mount = start(features=masked_features("resend"), masked_features=("resend",))
    reading = slow_read(mount, direct=True)
    kill(mount, "gate")
    content, said = reading.communicate(timeout=WAIT_S)
    assert (content, reading.returncode) == (b"", 1)
    assert b"connection abort" in said
    assert mount.read("file").stdout == CONTENT


AT_ONCE = {"notification_wait_s": 0}
"""Notifications are written while requests are in flight; without it the gate waits, and hardly ever hangs in one."""


def hanging_notification(mount: Supervised) -> subprocess.Popen[bytes]:
    """A read of `slow` that a worker holds, and a thread of the gate that waits for it in the kernel."""
    reading = slow_read(mount)
    gate = mount.parts()["gate"]["pid"]
    (mount.orders / "invalidate").touch()

    def hangs() -> bool:
        threads = Path(f"/proc/{gate}/task").glob("*/stat")
        return "D" in {thread.read_text().rpartition(")")[2].split()[0] for thread in threads}

    until(hangs, "the notification waits for the READ in flight")
    assert not (mount.orders / "invalidated").exists()
    return reading


def first_thread_is_gone(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_sigkill_of_a_gate_that_waits_in_the_kernel_is_seen_and_mended(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """Such a process is not reaped before the READ that it waits for is answered: by the next gate."""
    if not FEATURES.usable("resend"):
        pytest.skip(FEATURES["resend"].why)
    expected_logs("the gate ended; requests in flight are put back", count=1)
    mount = start(gate_settings=AT_ONCE)
    reading = hanging_notification(mount)
    pid = mount.parts()["gate"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: first_thread_is_gone(pid), "its first thread has ended")
    assert Path(f"/proc/{pid}").exists(), "another one waits in the kernel"
    until(lambda: mount.parts()["gate"]["pid"] != pid, "a new gate runs")
    answer_slow_reads(mount)
    assert reading.communicate(timeout=WAIT_S)[0] == CONTENT[: 64 << 10]
    until(lambda: not Path(f"/proc/{pid}").exists(), "the dead gate has gone")
    assert mount.read("file").stdout == CONTENT


def test_sigkill_of_a_gate_that_waits_in_the_kernel_without_resend_ends_the_mount(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """Nobody can answer what it had read, so the connection is aborted: callers get errors, none waits for ever."""
    mount = start(features=masked_features("resend"), masked_features=("resend",), gate_settings=AT_ONCE)
    pids = mount.pids()
    reading = hanging_notification(mount)
    os.kill(mount.parts()["gate"]["pid"], signal.SIGKILL)
    assert mount.ended() == 70
    assert "and the requests that it had can't be given back" in mount.stderr()
    reading.communicate(timeout=WAIT_S)
    assert reading.returncode != 0
    nothing_is_left(mount, pids)


def test_sigterm_while_a_notification_waits_in_the_kernel_ends_with_0(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """The grace passes, then the connection is aborted: the detached mount could not be reached by its name."""
    expected_logs("the mount is busy: detached", count=1)
    expected_logs("requests in flight did not finish in time", count=1)
    mount = start(grace_s=1, gate_settings=AT_ONCE)
    pids = mount.pids()
    reading = hanging_notification(mount)
    os.kill(mount.pid, signal.SIGTERM)
    assert mount.ended(within_s=30) == 0
    reading.communicate(timeout=WAIT_S)
    assert reading.returncode != 0
    nothing_is_left(mount, pids)


def test_a_gate_that_hangs_is_replaced(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the gate is stuck and is replaced", count=1)
    expected_logs("the gate ended", count=1)
    mount = start(silent_s=1.0)
    pid = mount.parts()["gate"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert mount.read("file").stdout == CONTENT
    assert mount.parts()["gate"]["pid"] != pid


def test_sigkill_of_the_supervisor_leaves_no_process_and_no_caller_waits(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    # The gate may see the supervisor's socket end before its own SIGKILL comes.
    expected_logs("the supervisor (is gone|was not told)", optional=True)
    mount = start()
    pids = mount.pids()
    reading = slow_read(mount)
    os.kill(mount.pid, signal.SIGKILL)
    assert mount.ended() == -signal.SIGKILL
    until(lambda: not any(map(runs, pids)), "the kernel has killed every part")
    reading.communicate(timeout=WAIT_S)
    assert reading.returncode != 0
    late = mount.read("file")
    assert late.returncode != 0
    assert is_mounted(mount.mountpoint), "a dead mount stays, which the next start takes down"


@pytest.mark.long
def test_workers_that_die_at_their_start_mean_eio_until_one_lives(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs("a worker ended")
    expected_logs("every worker dies at its start: requests are answered EIO", count=1)
    expected_logs("workers die as fast as they start: every request is answered EIO", count=1)
    mount = start(workers=1)
    blocker = mount.dies_at_start("worker")
    blocker.touch()
    kill(mount, "worker 0")
    until(lambda: "every worker dies at its start: requests are answered EIO" in mount.events(), "a crash loop")
    began_s = time.monotonic()
    refused = mount.read("file")
    assert refused.returncode != 0
    assert b"Input/output error" in refused.stderr
    assert time.monotonic() - began_s < 5, "at once, not after the next try"
    assert mount.parts()["worker 0"]["crash_looping"]
    blocker.unlink()
    until(lambda: "a worker is ready again" in mount.events(), "the try every 10 s succeeds")
    assert mount.read("file").stdout == CONTENT


def test_a_worker_that_hangs_is_replaced(start: Start, expected_logs: Callable[..., None]) -> None:
    """Not one that has answered everything: nobody waits for it."""
    expected_logs("a worker is stuck and is replaced", count=1)
    expected_logs("a worker ended", count=1)
    mount = start(workers=1, silent_s=1.0)
    until(lambda: mount.parts()["worker 0"]["ready"], "the worker is ready")
    pid = mount.parts()["worker 0"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert mount.read("file").stdout == CONTENT
    assert mount.parts()["worker 0"]["pid"] != pid


def test_a_worker_that_closes_its_socket_and_does_not_end_is_replaced(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """Each does that is asked to read `leave`: with every one of them the mount would be without workers for ever."""
    expected_logs("a worker ended", count=1)
    expected_logs("request answered EIO: every worker that held it died", count=1)
    mount = start(worker_argv=(sys.executable, "-S", "-m", "tests.support.hostile_worker"))
    before = {part["pid"] for name, part in mount.parts().items() if name.startswith("worker")}
    reading = mount.reading("leave", direct=True)
    assert b"Input/output error" in reading.communicate(timeout=WAIT_S)[1]
    assert mount.read("file").stdout == CONTENT
    assert not any(map(runs, before))


@pytest.mark.parametrize("how", ["stopped", "endless loop"])
def test_an_agent_that_hangs_prints_its_stacks_and_is_replaced(
    start: Start, how: str, expected_logs: Callable[..., None]
) -> None:
    """S41; F03 for the agent: reads don't notice."""
    expected_logs("the agent is stuck and is replaced", count=1)
    expected_logs("the agent ended, reads go on", count=1)
    mount = start(silent_s=1.0)
    until(lambda: mount.parts()["agent"]["ready"], "the agent is ready")
    pid = mount.parts()["agent"]["pid"]
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        (mount.orders / "hang").touch()
        until(lambda: cpu_s(pid) > 0.2, "it loops")
        (mount.orders / "hang").unlink()
    assert mount.read("file").stdout == CONTENT
    until(lambda: not runs(pid), "it is gone")
    until(lambda: mount.parts()["agent"]["ready"], "another one is ready")
    assert mount.parts()["agent"]["restarts"] == 1
    assert re.search(r'File ".*stand_in_agent\.py", line \d+ in main', mount.stderr())


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_in_an_endless_loop_prints_its_stacks_and_is_replaced(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """S41; F03: the request that it took is answered by another one, and other requests are not held up."""
    expected_logs("a worker is stuck and is replaced", count=1)
    expected_logs("a worker ended", count=1)
    mount = start(silent_s=2.0)
    until(lambda: all(part["ready"] for part in mount.parts().values()), "all are ready")
    before = {pid for _, pid, _ in workers(mount)}
    reading = mount.reading("endless", direct=True)
    until((mount.orders / "looping").exists, "a worker loops")
    assert mount.read("file").stdout == CONTENT
    content, said = reading.communicate(timeout=WAIT_S)
    assert content == CONTENT[: 64 << 10], said
    until(lambda: len(before & {pid for _, pid, _ in workers(mount)}) == 1, "one of them was replaced")
    assert sum(restarts for _, _, restarts in workers(mount)) == 1
    assert re.search(r'File ".*stand_in_worker\.py", line \d+ in _handle', mount.stderr())


def test_a_gate_that_dies_at_its_start_ends_the_mount_with_70(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the (spare )?gate ended")
    mount = start()
    spare_stands_by(mount)
    mount.dies_at_start("gate").touch()
    pid = kill(mount, "gate")
    until(lambda: mount.parts()["gate"]["pid"] not in (None, pid), "the one that stood by goes on")
    pids = mount.pids()
    kill(mount, "gate")
    assert mount.ended() == 70
    nothing_is_left(mount, pids)
    assert "fusecache: the gate ended with exit code 3 again and again" in mount.stderr()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("agent", "the agent ended with exit code 3 before the mount was ready"),
        ("gate", "the gate ended with exit code 3 before the mount was ready"),
        ("worker", "worker 0 ended with exit code 3 again and again before the mount was ready"),
    ],
)
def test_a_part_that_dies_before_the_mount_is_ready_ends_it_with_70(
    tmp_path: Path, part: str, text: str, expected_logs: Callable[..., None]
) -> None:
    expected_logs("a worker ended", optional=True)
    with Supervised(tmp_path, FEATURES, workers=1) as mount:
        mount.dies_at_start(part).touch()
        mount.start()
        # A gate whose end takes more than a second on a busy machine is given up before its exit code is known.
        late = text.replace("exit code 3", "a signal, while a notification hangs")
        told = mount.report.decode()
        assert told in (f"error 70 {text}\n", f"error 70 {late}\n")
        assert mount.ended() == 70
        assert not is_mounted(mount.mountpoint)
        assert f"fusecache: {told.removeprefix('error 70 ')}" in mount.stderr()


def test_an_agent_that_fails_gives_its_own_exit_code_and_text(tmp_path: Path) -> None:
    with Supervised(tmp_path, FEATURES) as mount:
        (mount.orders / "agent fails").write_text("6 127.0.0.1:19998: no answer\nwithin 30 s")
        mount.start()
        assert mount.report == b"error 6 127.0.0.1:19998: no answer within 30 s\n"
        assert mount.ended() == 6


def test_an_agent_that_fails_later_is_tried_again(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs("the agent ended, reads go on", count=1)
    expected_logs("the agent failed, reads go on", count=1)
    mount = start()
    until(lambda: mount.parts()["agent"]["ready"], "the first agent is ready")
    order = mount.orders / "agent fails"
    order.write_text("6 the masters are away")
    kill(mount, "agent")
    until(lambda: "the masters are away" in mount.stderr(), "the next agent failed")
    order.unlink()
    assert mount.read("file").stdout == CONTENT
    until(lambda: mount.parts()["agent"]["ready"], "an agent that can do its work")


def test_a_mount_point_in_use_is_refused_with_3(start: Start, tmp_path: Path) -> None:
    first = start()
    with Supervised(tmp_path, FEATURES) as second:
        second.start()
        assert second.report.startswith(b"error 3 mount point ")
        assert b"has a mount of type fuse.fusecache on it" in second.report
        assert second.ended() == 3
        assert first.read("file").stdout == CONTENT, "the mount that was there is untouched"
        # Both have one folder: take the first down before the second's way out looks there.
        subprocess.run(["umount", str(first.mountpoint)], check=True, timeout=WAIT_S)
        assert first.ended() == 0


def test_a_mount_that_the_kernel_refuses_ends_with_3(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with Supervised(tmp_path, FEATURES, mountpoint=str(missing)) as mount:
        mount.start()
        assert mount.report.decode() == f"error 3 '{missing}' can't be mounted on: No such file or directory\n"
        assert mount.ended() == 3


def test_a_signal_before_ready_ends_without_a_mount(tmp_path: Path) -> None:
    with Supervised(tmp_path, FEATURES, agent_argv=("/bin/sh", "-c", "exec sleep 60", "sh")) as mount:
        mount.start(wait=False)
        until(lambda: "fusecache: supervisor" in Path(f"/proc/{mount.pid}/cmdline").read_text(), "it runs")
        children = Path(f"/proc/{mount.pid}/task/{mount.pid}/children")
        pids = [int(pid) for pid in until(lambda: children.read_text().split(), "the agent runs")]
        os.kill(mount.pid, signal.SIGTERM)
        assert mount.ended() == 128 + signal.SIGTERM
        assert "fusecache: ended by SIGTERM before the mount was ready" in mount.stderr()
        nothing_is_left(mount, pids)


def test_a_broken_specification_is_a_usage_error() -> None:
    descriptor = os.memfd_create("spec", 0)
    try:
        os.write(descriptor, b'{"mountpoint": 7}')
        done = subprocess.run(
            [sys.executable, "-S", "-m", "fusecache.kernel.supervisor.main", "--spec-fd", str(descriptor)],
            capture_output=True, text=True, timeout=WAIT_S, check=False, pass_fds=(descriptor,),
            env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)},
        )  # fmt: skip
    finally:
        os.close(descriptor)
    assert done.returncode == 2
    assert done.stderr.startswith("fusecache: the mount specification lacks agent_argv, ")


def test_masked_as_an_older_kernel_workers_are_shown_its_init(start: Start) -> None:
    words = features.parse_mask("as-5.14")
    mount = start(features=masked_features(*words), masked_features=words)
    shown = parse_request((mount.orders / "init").read_bytes())
    assert (shown.major, shown.minor) == (7, 34)
    assert not shown.flags & INIT_EXT
    assert shown.flags < 1 << 32
    assert mount.read("file").stdout == CONTENT
