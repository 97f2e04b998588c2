"""A mount goes from one supervisor to another: real supervisors and gates, stand-ins for agents and workers.

Where a side has to fail at a certain point, the test plays it (`tests.support.taker`). What proves that no request was
lost is a read that a worker of the old side holds when the mount changes hands: it must come back with its bytes, also
where the kernel can't be asked to send requests again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fusecache
from fusecache.errors import MountError, StateError
from fusecache.kernel import features, probe
from fusecache.kernel.supervisor.takeover.line import LineLost
from fusecache.kernel.supervisor.takeover.messages import PROTOCOLS
from fusecache.kernel.supervisor.takeover.private_socket import connect
from tests.support import stand_in_worker
from tests.support.limits import no_more_descriptors
from tests.support.mounting import is_mounted, needs_fuse
from tests.support.supervised import PACKAGE_FOLDER, SOURCE, WAIT_S, Supervised, runs, until
from tests.support.taker import Taker

FEATURES = probe.probe()
CONTENT = stand_in_worker.CONTENT
FIRST = CONTENT[: 64 << 10]
BACK = "the mount was not taken over: this process goes on serving"
GONE = "the process that was taking over is gone"

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(not FEATURES.usable("mount"), reason=f"no mount(2) here: {FEATURES['mount'].why}"),
]

Start = Callable[..., Supervised]


def without_resend() -> features.Features:
    """As on a kernel before 6.9."""
    return features.judge({row.name: features.Observation(row.present, row.why) for row in FEATURES.rows}, ["resend"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts supervised mounts at one mount point, and takes down what a failed test leaves."""
    with contextlib.ExitStack() as stack:

        def make(*, wait: bool = True, takes_over: bool = False, **fields: Any) -> Supervised:
            mount = stack.enter_context(Supervised(tmp_path, fields.pop("features", without_resend()), **fields))
            mount.start(wait=wait, takes_over=takes_over)
            return mount

        yield make


def slow_read(mount: Supervised) -> subprocess.Popen[bytes]:
    """A read that a worker holds until `answer_slow_reads`. Direct: the kernel does not try it again."""
    (mount.orders / "asked").unlink(missing_ok=True)
    reading = mount.reading("slow", direct=True)
    until((mount.orders / "asked").exists, "a worker was asked for the slow file")
    return reading


def answer_slow_reads(mount: Supervised, *readings: subprocess.Popen[bytes]) -> None:
    """All of them end with the right bytes."""
    (mount.orders / "go").touch()
    for reading in readings:
        content, said = reading.communicate(timeout=WAIT_S)
        assert (reading.returncode, content) == (0, FIRST), said
    (mount.orders / "go").unlink()


def lines_of(mount: Supervised) -> int:
    """How many mounts lie on the mount point."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(line.split()[4] == str(mount.mountpoint) for line in lines)


def all_have_ended(pids: Iterable[int]) -> None:
    """Every process of an old side."""
    until(lambda: not any(map(runs, pids)), f"all of {pids} have ended")


def serves(mount: Supervised) -> None:
    """Reads work, there is one mount, and it is this supervisor's."""
    assert mount.read("file").stdout == CONTENT
    assert lines_of(mount) == 1
    assert mount.parts()["supervisor"]["pid"] == mount.pid


@pytest.mark.parametrize("mode", ["no-open", "passthrough"])
@pytest.mark.parametrize("resend", [False, True])
def test_a_mount_is_taken_over_with_what_is_in_flight_and_what_is_open(start: Start, mode: str, resend: bool) -> None:
    """S42."""
    if mode == "passthrough" and not FEATURES.usable("passthrough"):
        pytest.skip(FEATURES["passthrough"].why)
    seen = FEATURES if resend else without_resend()
    old = start(mode=mode, features=seen)
    (old.orders / "backing").write_bytes(CONTENT)
    old_pids = old.pids()
    device = os.stat(old.mountpoint).st_dev
    held = [os.open(old.mountpoint / name, os.O_RDONLY) for name in ("file", "huge")]
    try:
        reading = slow_read(old)
        for _ in range(2):
            new = start(mode=mode, features=seen, takes_over=True)
            assert new.report == b"ready\n"
            assert old.ended() == 0
            all_have_ended(old_pids)
            assert reading.poll() is None, "the read is still in flight"
            assert os.stat(new.mountpoint).st_dev == device
            serves(new)
            os.posix_fadvise(held[1], 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(held[0], 4096, 8192) == CONTENT[8192:12288]
            assert os.pread(held[1], 4096, 8 << 20) == CONTENT[:4096]
            old, old_pids = new, new.pids()
        answer_slow_reads(new, reading)
    finally:
        for descriptor in held:
            os.close(descriptor)
    os.kill(new.pid, signal.SIGTERM)
    assert new.ended() == 0
    assert not is_mounted(new.mountpoint)


def test_another_source_and_another_protocol_are_refused_and_nothing_stops(start: Start) -> None:
    mount = start()
    before = mount.parts()
    with Taker(mount.takeover_socket, "another") as taker:
        assert re.search("'another'.*no upgrade", taker.hear("refused")["text"])
    with Taker(mount.takeover_socket, SOURCE, protocols=[98, 99]) as taker:
        assert "[98, 99]" in taker.hear("refused")["text"]
    after = mount.parts()
    assert {name: part["pid"] for name, part in after.items()} == {name: part["pid"] for name, part in before.items()}


def test_two_at_once_one_wins_and_the_other_is_told(start: Start, expected_logs: Callable[..., None]) -> None:
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    with Taker(mount.takeover_socket, SOURCE) as first:
        first.hear("yielding")
        with Taker(mount.takeover_socket, SOURCE) as second:
            assert "another process is taking it over right now" in second.hear("refused")["text"]
        first.hear("given")
    serves(mount)


def test_who_says_nothing_or_something_else_gets_nothing(start: Start) -> None:
    mount = start()
    with contextlib.closing(connect(str(mount.takeover_socket))) as silent:
        with contextlib.closing(connect(str(mount.takeover_socket))) as wrong:
            wrong.send({"kind": "ready"})
            assert "begins with hello" in wrong.receive_within(WAIT_S)[0]["text"]
            with pytest.raises(LineLost):
                wrong.receive_within(WAIT_S)
        serves(mount)
        assert silent.receive() is None
    new = start(takes_over=True)
    assert mount.ended() == 0
    serves(new)


@pytest.mark.parametrize("until_ready", [False, True])
def test_a_new_side_that_dies_gives_the_mount_back(
    start: Start, until_ready: bool, expected_logs: Callable[..., None]
) -> None:
    """Killed while it prepares, or with the old gate emptied: what was in flight is answered all the same."""
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    reading = slow_read(mount)
    agent = mount.parts()["agent"]["pid"]
    with Taker(mount.takeover_socket, SOURCE) as taker:
        if until_ready:
            taker.drained()
        else:
            taker.given()
        assert not runs(agent), "the agent was not ended"
    answer_slow_reads(mount, reading)
    serves(mount)
    assert mount.parts()["agent"]["pid"] != agent
    new = start(takes_over=True)  # and it can still be taken over
    assert mount.ended() == 0
    serves(new)


def test_a_real_new_side_that_is_killed_while_it_prepares_leaves_nothing(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    waits = mount.orders / "agent waits"
    waits.touch()
    new = start(takes_over=True, wait=False)
    assert new.process is not None
    reading = slow_read(mount)
    new.process.kill()
    new.process.wait(WAIT_S)
    waits.unlink()
    answer_slow_reads(mount, reading)
    serves(mount)


def test_a_new_side_that_is_not_ready_in_time_gives_the_mount_back(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs(BACK, count=1)
    mount = start(takeover_s=1)
    waits = mount.orders / "agent waits"
    waits.touch()
    new = start(takes_over=True, wait=False)
    assert new.ended() == MountError.exit_code
    waits.unlink()
    assert "took it back: it was not ready" in new.stderr()
    assert is_mounted(mount.mountpoint)
    serves(mount)


def test_a_new_side_that_is_stopped_finds_out_that_it_was_too_late(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """Its `drained` lies unread while the old side waits: only one of them reads the device afterwards."""
    expected_logs(BACK, count=1)
    mount = start()
    reading = slow_read(mount)
    with Taker(mount.takeover_socket, SOURCE) as taker:
        taker.drained()
        taker.hear("withdrawn")
        assert not taker.take(), "the old side has it"
    answer_slow_reads(mount, reading)
    serves(mount)


def test_a_new_side_that_took_the_mount_and_died_before_it_said_so_is_replaced(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """It may have read requests that nobody will answer: they go the way of a dead gate's."""
    if not FEATURES.usable("resend"):
        pytest.skip(FEATURES["resend"].why)
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    expected_logs("the gate ended; requests in flight are put back", count=1)
    mount = start(features=FEATURES)
    reading = slow_read(mount)
    with Taker(mount.takeover_socket, SOURCE) as taker:
        taker.drained()
        assert taker.take()
    answer_slow_reads(mount, reading)
    serves(mount)


def test_a_stranger_who_comes_and_goes_takes_nothing_from_a_mount_on_its_way_back(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """The new side is lost, the old gate not emptied yet: what that is emptied into is needed still."""
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    reading = slow_read(mount)
    gate = mount.parts()["gate"]["pid"]
    with Taker(mount.takeover_socket, SOURCE) as taker:
        taker.given()
        os.kill(gate, signal.SIGSTOP)
        taker.say("ready")
    until(lambda: GONE in mount.events(), "the new side is lost")
    connect(str(mount.takeover_socket)).close()
    until(lambda: "a process that came to take over is gone" in mount.events(), "the stranger came and went")
    os.kill(gate, signal.SIGCONT)
    answer_slow_reads(mount, reading)
    serves(mount)


@pytest.mark.parametrize("victim", ["gate", "supervisor"])
def test_the_old_side_dies_in_the_middle(start: Start, victim: str, expected_logs: Callable[..., None]) -> None:
    """The gate: the mount goes back, and the gate is replaced. The supervisor: the new side has all it needs."""
    if not FEATURES.usable("resend"):
        pytest.skip(FEATURES["resend"].why)
    mount = start(features=FEATURES)
    pids = {name: part["pid"] for name, part in mount.parts().items()}
    waits = mount.orders / "agent waits"
    waits.touch()
    new = start(takes_over=True, wait=False, features=FEATURES)
    reading = slow_read(mount)
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "gate":
        expected_logs(BACK, count=1)
        expected_logs("the gate ended; requests in flight are put back", count=1)
        assert new.ended() == MountError.exit_code
        waits.unlink()
        answer_slow_reads(mount, reading)
        serves(mount)
    else:
        expected_logs("the old process is gone in the middle of the take-over", count=1)
        all_have_ended(pids.values())
        waits.unlink()
        answer_slow_reads(new, reading)
        serves(new)


def test_the_old_side_is_killed_without_resend(start: Start, expected_logs: Callable[..., None]) -> None:
    """What its gate held fails at once, as with any dead gate there; the mount goes on."""
    expected_logs("the old process is gone in the middle of the take-over", count=1)
    mount = start()
    waits = mount.orders / "agent waits"
    waits.touch()
    new = start(takes_over=True, wait=False)
    reading = slow_read(mount)
    assert mount.process is not None
    mount.process.kill()
    waits.unlink()
    content, said = reading.communicate(timeout=WAIT_S)
    assert reading.returncode != 0, content
    assert b"abort" in said
    serves(new)


def test_sigterm_in_the_middle_waits_for_the_hand_over(start: Start) -> None:
    """What Kubernetes sends to the old pod must not unmount what the new one is about to serve."""
    mount = start()
    waits = mount.orders / "agent waits"
    waits.touch()
    new = start(takes_over=True, wait=False)
    os.kill(mount.pid, signal.SIGTERM)
    until(lambda: "ending, once it is clear who has the mount" in mount.events(), "it has heard the signal")
    assert is_mounted(mount.mountpoint)
    waits.unlink()
    assert mount.ended() == 0
    serves(new)


def test_sigterm_in_the_middle_of_one_that_fails_unmounts_then(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    with Taker(mount.takeover_socket, SOURCE) as taker:
        taker.given()
        os.kill(mount.pid, signal.SIGTERM)
        until(lambda: "ending, once it is clear who has the mount" in mount.events(), "it has heard the signal")
    assert mount.ended() == 0
    assert not is_mounted(mount.mountpoint)


def test_another_cluster_at_the_same_source_is_no_upgrade(start: Start, expected_logs: Callable[..., None]) -> None:
    """Its ids, which the kernel keeps as inodes, name other files."""
    expected_logs(BACK, count=1)
    expected_logs(GONE, count=1)
    mount = start()
    (mount.orders / "cluster").write_text("another")
    new = start(takes_over=True, wait=False)
    assert new.ended() == MountError.exit_code
    assert "is another cluster ('another')" in new.stderr()
    (mount.orders / "cluster").unlink()
    serves(mount)


# Who may ask


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_another_user_does_not_reach_the_socket(start: Start) -> None:
    """F18: a worker that was given other rights can't take the mount either."""
    mount = start()
    folder = mount.takeover_socket.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(mount.takeover_socket.stat().st_mode) == 0o600
    script = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    shown = folder.parent
    while shown != Path("/tmp") and shown != Path("/"):
        shown.chmod(0o755)  # so that it is this folder that keeps them out
        shown = shown.parent
    done = subprocess.run(
        [*as_nobody, sys.executable, "-S", "-c", script, str(mount.takeover_socket)], capture_output=True, check=False
    )
    assert b"PermissionError" in done.stderr
    # Even where the folder lets somebody in, the kernel says who it is.
    folder.chmod(0o711)
    mount.takeover_socket.chmod(0o666)
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); "
        """s.send(b'{"kind": "hello"}'); sys.exit(len(s.recv(9999)))"""
    )
    done = subprocess.run(
        [*as_nobody, sys.executable, "-S", "-c", script, str(mount.takeover_socket)], capture_output=True, check=False
    )
    assert done.returncode == 0 or b"ConnectionResetError" in done.stderr or b"BrokenPipe" in done.stderr, done
    serves(mount)


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_folder_that_is_not_private_is_not_used(start: Start, tmp_path: Path, kind: str) -> None:
    """F18."""
    mount = start()
    folder = tmp_path / "elsewhere"
    if kind == "link":
        folder.symlink_to(mount.takeover_socket.parent)
    else:
        folder = mount.takeover_socket.parent
        folder.chmod(0o770)
    with pytest.raises((StateError, MountError)):
        connect(str(folder / "takeover.sock"))
    folder.chmod(0o700)


# Two builds


def other_build(folder: Path, version: str, protocols: tuple[int, int]) -> Path:
    """A copy of the package with other numbers."""
    shutil.copytree(PACKAGE_FOLDER / "fusecache", folder / "fusecache", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pattern, text in (
        ("__init__.py", r'__version__ = "[^"]*"', f'__version__ = "{version}"'),
        ("kernel/supervisor/takeover/messages.py", r"PROTOCOLS: Final = \(.*\)", f"PROTOCOLS: Final = {protocols}"),
    ):
        path = folder / "fusecache" / name
        changed, count = re.subn(pattern, text, path.read_text())
        assert count == 1, name
        path.write_text(changed)
    return folder


def test_two_builds_take_over_from_each_other_both_ways(start: Start, tmp_path: Path) -> None:
    """An upgrade to a build that speaks more, and the way back."""
    later = other_build(tmp_path / "later", "99.0", (PROTOCOLS[0], PROTOCOLS[1] + 6))
    mount = start()
    new = start(takes_over=True, package=later)
    assert mount.ended() == 0
    serves(new)
    assert f"as before: taken over from version {fusecache.__version__}" in new.status()["why"]
    back = start(takes_over=True)
    assert new.ended() == 0
    serves(back)
    assert "as before: taken over from version 99.0" in back.status()["why"]


def test_a_build_without_a_common_protocol_refuses(start: Start, tmp_path: Path) -> None:
    strange = other_build(tmp_path / "strange", "99.0", (90, 91))
    mount = start(package=strange)
    with Taker(mount.takeover_socket, SOURCE) as taker:
        assert "it speaks the take-over protocols 90 to 91" in taker.hear("refused")["text"]
    serves(mount)


def test_f17_who_comes_while_the_old_side_has_no_descriptor_left_waits_or_is_told(
    start: Start, expected_logs: Callable[..., None]
) -> None:
    """And the old side does not look for it all the time meanwhile, and serves on."""
    expected_logs("who comes to take over has to wait")
    expected_logs(GONE, count=1)
    expected_logs(BACK, count=1)
    expected_logs("the agent ended, reads go on", count=1)
    old = start()
    until(lambda: old.parts()["spare gate"]["ready"], "the spare gate has all its descriptors")
    with no_more_descriptors(old.pid):
        taker = Taker(old.takeover_socket, SOURCE)
        until(lambda: "who comes to take over has to wait" in old.events(), "it can't be let in")
        assert old.read("file").stdout == CONTENT
    with taker:
        taker.hear("yielding")
    until(lambda: BACK in old.events(), "the old side goes on")
    assert old.events().count("who comes to take over has to wait") < 20
    serves(old)
