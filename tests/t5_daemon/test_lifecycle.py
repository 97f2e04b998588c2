"""A mount's life through the real command: start, signals, kill -9, two at once, no cluster; what is left afterwards.

The signal tests use a cluster in this process, so that a fault plan can hold replies back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache.embedded.faults import FaultPlan
from tests.support.embedded import embedded_server
from tests.support.faulty_proxy import FaultyProxy
from tests.support.mount_namespace import own_mount_namespace
from tests.support.mounting import Mount, command, is_mounted, needs_fuse
from tests.support.process_tree import descendants

pytestmark = needs_fuse

WAIT_S = 20.0
POLL_S = 0.02
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
"""What the kernel says when the daemon of an open file has ended."""

CONTENT = bytes(range(256)) * 1024


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """State and control sockets of this test only."""
    return {
        **os.environ,
        "FUSECACHE_STATE_DIR": str(tmp_path / "state"),
        "FUSECACHE_RUNTIME_DIR": str(tmp_path / "run"),
        "FUSECACHE_LOG_FORMAT": "json",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder SOURCE with one file."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(CONTENT)
    return source


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty folder; whatever a failed test leaves mounted there is taken down."""
    place = tmp_path / "mnt"
    place.mkdir()
    yield place
    while is_mounted(place):
        subprocess.run(["umount", "-l", str(place)], check=True)


def until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(POLL_S)


def until_dead(pids: list[int], what: str) -> None:
    """Wait until none of the processes runs."""
    until(lambda: not any(map(alive, pids)), what)


def run(*arguments: str, environment: dict[str, str], timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [*command(), *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def mounts_at(place: Path) -> int:
    """How many mounts lie on top of each other."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(line.split()[4] == str(place) for line in lines)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(mount: Mount) -> int:
    """Exit code of the daemon, which ends by itself."""
    assert mount.process is not None
    return mount.process.wait(timeout=WAIT_S)


def pid_of(answer: subprocess.CompletedProcess[str]) -> int:
    """Process id that `mount --daemon` told."""
    found = re.search(r"process (\d+)", answer.stdout)
    assert found is not None, (answer.stdout, answer.stderr)
    return int(found[1])


def close_gone(descriptor: int) -> None:
    """close(2) of a file whose daemon is gone: the kernel may report that."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def daemon(folder: Path, place: Path, environment: dict[str, str]) -> int:
    """`mount --daemon`; its process id. 0 means that reads work."""
    answer = run("mount", "--daemon", str(folder), str(place), environment=environment, timeout_s=60)
    assert answer.returncode == 0, answer.stderr
    assert os.listdir(place) == os.listdir(folder)
    return pid_of(answer)


def test_sigterm_idle_mount_ends_with_0_and_leaves_nothing(
    folder: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    """S25."""
    mount = Mount(str(folder), mountpoint, environment=environment)
    with contextlib.ExitStack() as stack:
        stack.callback(mount.cleanup)
        mount.start()
        children = descendants(mount.pid)
        assert children, "a folder SOURCE has an embedded server as its child"
        os.kill(mount.pid, signal.SIGTERM)
        assert ended(mount) == 0
        assert not is_mounted(mountpoint)
        until_dead(children, "the embedded server ends with its mount")
        assert list(mountpoint.iterdir()) == []


def test_sigterm_with_reads_in_flight_lets_them_finish(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """S25: requests in flight get their bytes, then the mount is gone and the exit code 0."""
    # The mount is busy while the file is open, which depends on who is quicker.
    expected_logs("the mount is busy", optional=True)
    plan = FaultPlan()
    slow = plan.on("ReadBlock").delay(1.5)
    with embedded_server(folder, tmp_path / "server", faults=plan) as server, ThreadPoolExecutor(4) as pool:
        mount = Mount(f"alluxio://{server.master_target}/", mountpoint, environment=environment)
        with contextlib.ExitStack() as stack:
            stack.callback(mount.cleanup)
            mount.start()
            path = mountpoint / "file"
            descriptors = [os.open(path, os.O_RDONLY) for _ in range(4)]
            offsets = range(0, 4 * 4096, 4096)
            try:
                reads = [
                    pool.submit(os.pread, descriptor, 4096, offset)
                    for descriptor, offset in zip(descriptors, offsets, strict=True)
                ]
                until(lambda: slow.injected > 0, "a read is held back")
                os.kill(mount.pid, signal.SIGTERM)
                got = [read.result(WAIT_S) for read in reads]
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            assert got == [CONTENT[offset : offset + 4096] for offset in offsets]
            assert ended(mount) == 0
            assert not is_mounted(mountpoint)


@pytest.mark.skipif(os.geteuid() != 0, reason="another mount namespace needs root")
def test_sigterm_mount_that_another_namespace_has_copied_ends_all_the_same(
    folder: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """S25: a container with a copy of the mount keeps the kernel from ending it; the process ends, and says so."""
    expected_logs("another mount namespace still has the mount", count=1)
    mount = Mount(str(folder), mountpoint, environment=environment)
    with contextlib.ExitStack() as stack:
        stack.callback(mount.cleanup)
        mount.start()
        copy = stack.enter_context(subprocess.Popen([*own_mount_namespace(keep=mountpoint), "sleep", "1000"]))
        stack.callback(copy.kill)
        theirs = Path(f"/proc/{copy.pid}/mountinfo")
        until(
            lambda: Path(f"/proc/{copy.pid}/comm").read_text() == "sleep\n", "the other namespace is there as it stays"
        )
        os.kill(mount.pid, signal.SIGTERM)
        assert ended(mount) == 0
        assert not is_mounted(mountpoint)
        assert str(mountpoint) in theirs.read_text(), "the copy was gone, so nothing was tested"


def test_sigterm_busy_mount_is_detached_at_once_and_said_so(
    folder: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """S25: whoever still has a file open does not keep the mount; its later reads fail, they don't hang."""
    expected_logs("the mount is busy: detached", count=1)
    mount = Mount(str(folder), mountpoint, environment=environment)
    with contextlib.ExitStack() as stack:
        stack.callback(mount.cleanup)
        mount.start()
        held = os.open(mountpoint / "file", os.O_RDONLY)
        try:
            began = time.monotonic()
            os.kill(mount.pid, signal.SIGTERM)
            assert ended(mount) == 0
            assert time.monotonic() - began < 8, "a file that nobody reads must not hold up the end"
            assert not is_mounted(mountpoint)
            with pytest.raises(OSError) as failure:
                os.pread(held, 4096, 0)
            assert failure.value.errno in GONE
        finally:
            close_gone(held)


def test_sigterm_detached_daemon_does_not_take_the_next_mount_with_it(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """While the old daemon answers its last requests, a new one serves at the same place, and goes on doing so."""
    expected_logs("the mount is busy: detached", count=1)
    plan = FaultPlan()
    slow = plan.on("ReadBlock", nth=1).delay(6.0)
    with embedded_server(folder, tmp_path / "server", faults=plan) as server, ThreadPoolExecutor(1) as pool:
        mount = Mount(f"alluxio://{server.master_target}/", mountpoint, environment=environment)
        with contextlib.ExitStack() as stack:
            stack.callback(mount.cleanup)
            mount.start()
            held = os.open(mountpoint / "file", os.O_RDONLY)
            try:
                reading = pool.submit(os.pread, held, 4096, 0)
                until(lambda: slow.injected > 0, "a read is held back")
                os.kill(mount.pid, signal.SIGTERM)
                until(lambda: not is_mounted(mountpoint), "the old mount is detached")
                pid = daemon(folder, mountpoint, environment)
                assert reading.result(WAIT_S) == CONTENT[:4096]
                assert ended(mount) == 0
            finally:
                close_gone(held)
            assert mounts_at(mountpoint) == 1
            assert (mountpoint / "file").read_bytes() == CONTENT
            assert run("umount", str(mountpoint), environment=environment).returncode == 0
            until_dead([pid], "the new daemon ends")


@pytest.mark.long
def test_sigterm_while_no_master_answers_ends_in_time(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """A listing that waits for its master does not hold up the end until its budget is spent."""
    expected_logs("the mount is busy|request failed|master does not answer|did not finish in time", optional=True)
    # More than a mount looks into by itself to choose its open mode.
    names = [f"unknown{number:02}" for number in range(20)]
    for name in names:
        (folder / name).mkdir()
    with embedded_server(folder, tmp_path / "server") as server, FaultyProxy(server.master_target) as proxy:
        mount = Mount(f"alluxio://{proxy.target}/", mountpoint, environment=environment)
        with contextlib.ExitStack() as stack:
            stack.callback(mount.cleanup)
            mount.start()
            assert sorted(os.listdir(mountpoint)) == ["file", *names]
            proxy.black_hole()
            lister = subprocess.Popen(["ls", str(mountpoint / names[-1])], stderr=subprocess.PIPE)
            try:
                until(lambda: proxy.swallowed_bytes > 0, "the listing went into the black hole")
                os.kill(mount.pid, signal.SIGTERM)
                # In flight requests get 10 s; the budget of a listing is 120 s.
                assert ended(mount) == 0
                assert not is_mounted(mountpoint)
                _, text = lister.communicate(timeout=WAIT_S)
                assert lister.returncode != 0, text
            finally:
                lister.kill()
                lister.communicate()


def test_kill_9_leaves_a_dead_mount_that_the_next_mount_replaces(
    folder: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    """S25, user reports 4 and 7: dead, then served again, and never more than one line in mountinfo."""
    for _ in range(2):
        pid = daemon(folder, mountpoint, environment)
        assert (mountpoint / "file").read_bytes() == CONTENT
        assert mounts_at(mountpoint) == 1
        children = descendants(pid)
        assert children
        os.kill(pid, signal.SIGKILL)
        until_dead(children, "the embedded server ends when its mount is killed")
        assert is_mounted(mountpoint)
        with pytest.raises(OSError) as failure:
            os.statvfs(mountpoint)  # the kernel may still have the answer to a stat
        assert failure.value.errno == errno.ENOTCONN
    assert run("umount", str(mountpoint), environment=environment).returncode == 0
    assert not is_mounted(mountpoint)


def test_recovery_that_comes_before_its_cluster_is_made_up_for_later(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    """User report 5: who wants to bring a dead mount back while its cluster is away is told, leaves the place as it can
    be used, and can try again; who waits for the mount looks at what is, and is let go once it serves."""
    with (
        embedded_server(folder, tmp_path / "server") as server,
        FaultyProxy(server.master_target) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        source = f"alluxio://{proxy.target}/"

        def start(*flags: str) -> subprocess.CompletedProcess[str]:
            return run("mount", "--daemon", source, str(mountpoint), *flags, environment=environment, timeout_s=60)

        pid = pid_of(start())
        children = descendants(pid)
        os.kill(pid, signal.SIGKILL)
        until_dead([pid, *children], "the mount is dead")
        proxy.down()
        waiting = pool.submit(run, "wait", "--timeout-s", "60", str(mountpoint), environment=environment, timeout_s=60)
        early = start("--metadata-budget-s", "1s")
        assert early.returncode == 6, early.stderr
        assert mounts_at(mountpoint) <= 1
        assert not waiting.done(), waiting.result()
        proxy.heal()
        again = start()
        assert again.returncode == 0, again.stderr
        assert waiting.result().returncode == 0
        assert mounts_at(mountpoint) == 1
        assert (mountpoint / "file").read_bytes() == CONTENT
        assert run("umount", str(mountpoint), environment=environment).returncode == 0


def test_umount_is_idempotent_and_takes_dead_mounts_down(
    folder: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    """User report 8: a dead mount is unmounted like a live one, and nothing mounted is fine."""
    assert run("umount", str(mountpoint), environment=environment).returncode == 0
    for kill in (False, True):
        pid = daemon(folder, mountpoint, environment)
        if kill:
            os.kill(pid, signal.SIGKILL)
            until_dead([pid], "it is dead")
        assert is_mounted(mountpoint)
        for expected in ("unmounted", "not mounted"):
            done = run("umount", str(mountpoint), environment=environment)
            assert (done.returncode, done.stderr) == (0, "")
            assert expected in done.stdout
            assert not is_mounted(mountpoint)
        until_dead([pid], "the daemon ends with its mount")


def test_umount_of_a_busy_mount_detaches_after_its_time(
    folder: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    """Who has a file open keeps it; the daemon ends with the last of them."""
    pid = daemon(folder, mountpoint, environment)
    with (mountpoint / "file").open("rb", buffering=0) as held:
        done = run("umount", "--timeout-s", "0.3", str(mountpoint), environment=environment)
        assert (done.returncode, "detached" in done.stdout) == (0, True), done
        assert not is_mounted(mountpoint)
        os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert held.read() == CONTENT
        assert alive(pid)
    until_dead([pid], "the daemon ends with the last open file")


@pytest.mark.parametrize("same_source", [True, pytest.param(False, marks=pytest.mark.long)])
def test_two_starts_at_once_one_wins_and_the_other_is_told(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], same_source: bool
) -> None:
    """User report 7: never two mounts on top of each other, whoever starts them. One that comes later takes over, when
    its source is the same."""
    other = folder if same_source else tmp_path / "other"
    if not same_source:
        shutil.copytree(folder, other)

    def start(source: Path) -> subprocess.CompletedProcess[str]:
        return run("mount", "--daemon", str(source), str(mountpoint), environment=environment, timeout_s=60)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(start, [folder, other]))
    assert mounts_at(mountpoint) == 1, answers
    (winner,) = [answer for answer in answers if answer.returncode == 0]
    (loser,) = [answer for answer in answers if answer.returncode != 0]
    assert loser.returncode in (3, 4)
    assert len(loser.stderr.strip().splitlines()) == 1, loser.stderr
    if not same_source:  # else the embedded server's state may be what is found in use first
        assert str(mountpoint) in loser.stderr
    assert (mountpoint / "file").read_bytes() == CONTENT
    assert alive(pid_of(winner))
    served = folder if answers[0] is winner else other
    third, fourth = start(served), start(tmp_path)
    assert third.returncode == 0, third.stderr
    until_dead([pid_of(winner)], "the daemon was taken over")
    assert fourth.returncode == 3
    assert "umount" in fourth.stderr
    assert mounts_at(mountpoint) == 1
    assert run("umount", str(mountpoint), environment=environment).returncode == 0
    until_dead([pid_of(third)], "the daemon ends")


@pytest.mark.parametrize("background", [True, False])
def test_mount_of_a_black_holed_cluster_fails_in_time_and_leaves_nothing(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], background: bool
) -> None:
    """No master answers: one line that names it, exit code 6, no mount, no process."""
    with embedded_server(folder, tmp_path / "server") as server, FaultyProxy(server.master_target) as proxy:
        proxy.black_hole()
        flags = ["--daemon"] if background else []
        arguments = ["mount", *flags, f"alluxio://{proxy.target}/", str(mountpoint), "--metadata-budget-s", "2s"]
        done = run(*arguments, "--connect-s", "1s", environment=environment, timeout_s=15)
        assert proxy.swallowed_bytes > 0
    assert done.returncode == 6, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert proxy.target in last
    assert "Traceback" not in done.stderr
    assert not is_mounted(mountpoint)


def test_mount_of_a_cluster_that_hangs_after_login_fails_in_time_and_leaves_nothing(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    plan = FaultPlan()
    hung = plan.on("GetStatus").stall()
    with embedded_server(folder, tmp_path / "server", faults=plan) as server:
        arguments = ["mount", "--daemon", f"alluxio://{server.master_target}/", str(mountpoint)]
        done = run(*arguments, "--metadata-budget-s", "2s", "--rpc-try-s", "1s", environment=environment, timeout_s=15)
        assert hung.injected > 0
    assert done.returncode == 6, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not is_mounted(mountpoint)


def test_sigterm_at_any_moment_of_the_start_leaves_nothing(
    folder: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """S25: also between mount(2) and readiness."""
    expected_logs("the mount is busy", optional=True)
    moments: list[Callable[[], bool]] = [
        lambda: is_mounted(mountpoint),
        lambda: bool(descendants(process.pid)),
        lambda: (Path(environment["FUSECACHE_STATE_DIR"]) / "metadata").exists(),
    ]
    for moment in moments:
        shutil.rmtree(environment["FUSECACHE_STATE_DIR"], ignore_errors=True)
        process = subprocess.Popen(
            [*command(), "mount", str(folder), str(mountpoint)], env=environment, stdout=subprocess.DEVNULL
        )
        try:
            until(moment, "the moment")
            children = descendants(process.pid)
            process.terminate()
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
        assert not is_mounted(mountpoint)
        until_dead(children, "its children end")


def test_wait_ends_when_reads_work_or_its_time_is_over(
    folder: Path, mountpoint: Path, environment: dict[str, str]
) -> None:
    never = run("wait", "--timeout-s", "0.3", str(mountpoint), environment=environment)
    assert never.returncode == 5
    assert "nothing is mounted" in never.stderr
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, "wait", str(mountpoint), environment=environment)
        pid = daemon(folder, mountpoint, environment)
        assert waiting.result(WAIT_S).returncode == 0
    os.kill(pid, signal.SIGKILL)
    until_dead([pid], "it is dead")
    dead = run("wait", "--timeout-s", "0.3", str(mountpoint), environment=environment)
    assert dead.returncode == 5
    assert "dead" in dead.stderr
    assert run("umount", str(mountpoint), environment=environment).returncode == 0


def test_serve_runs_all_mounts_of_a_file_and_ends_them_together(
    folder: Path, tmp_path: Path, mountpoint: Path, environment: dict[str, str], expected_logs: Callable[..., None]
) -> None:
    """Both serve; SIGTERM ends both with 0; when one is killed the other is stopped and the exit code says so."""
    second = tmp_path / "second"
    second.mkdir()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    configuration = tmp_path / "fusecache.yaml"
    configuration.write_text(
        f"mounts:\n  - {{source: {folder}, mountpoint: {mountpoint}}}\n  - {{source: {other}, mountpoint: {second}}}\n"
    )
    for kill in (False, True):
        process = subprocess.Popen(
            [*command(), "serve", "--config", str(configuration)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline()
            for place in (mountpoint, second):
                assert (place / "file").read_bytes() == CONTENT
            started = descendants(process.pid)
            if kill:
                os.kill(mount_process(process.pid, mountpoint), signal.SIGKILL)
            else:
                process.terminate()
            _, text = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == (3 if kill else 0), text
        assert not is_mounted(mountpoint)
        assert not is_mounted(second)
        until_dead(started, "every process of it ends")


def mount_process(parent: int, place: Path) -> int:
    """The child of `serve` that runs one mount: its command line ends with the mount point."""
    for pid in descendants(parent):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        if shown.endswith(os.fsencode(place)):
            return pid
    raise AssertionError(f"no process of {parent} serves {place}")
