"""Bad input: one line that names the offending value and says what to do, the right exit code, no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from fusecache.cli.main import main
from fusecache.daemon import mountpoint
from fusecache.embedded.server import EmbeddedServer
from fusecache.errors import MountError
from tests.support.command import environment, error_line, fusecache
from tests.support.mount_namespace import own_mount_namespace
from tests.support.mounting import Mount, command, is_mounted, needs_fuse
from tests.support.process_tree import descendants
from tests.support.supervised import runs, until

USAGE, MOUNT, STATE, UPSTREAM = 2, 3, 4, 6

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount and change capabilities")


SOURCES = [
    ("hdfs://nn:8020/data", "'hdfs'", "alluxio://HOST:19998/PATH"),
    ("alluxio:///data", "alluxio:///data", "write alluxio://HOST:19998/PATH"),
    ("alluxio://m1:99999/data", "'99999'", "1 to 65535"),
    ("alluxio://m1:19998", "alluxio://m1:19998", "write alluxio://m1:19998/"),
    ("train:/data", "'train'", "--config FILE"),
    ("", "empty", "write"),
]


@pytest.mark.parametrize(("text", "named", "advice"), SOURCES, ids=[text or "empty" for text, _, _ in SOURCES])
def test_mount_wrong_source_is_named(tmp_path: Path, point: Path, text: str, named: str, advice: str) -> None:
    line = error_line(fusecache("mount", text, point, state=tmp_path), USAGE)
    assert named in line
    assert advice in line


def test_mount_file_as_source_is_named(tmp_path: Path, source: Path, point: Path) -> None:
    line = error_line(fusecache("mount", source / "photo.jpg", point, state=tmp_path), USAGE)
    assert f"'{source}/photo.jpg' is not a folder" in line


def test_mount_missing_source_is_named(tmp_path: Path, source: Path, point: Path) -> None:
    line = error_line(fusecache("mount", source / "no", point, state=tmp_path), USAGE)
    assert f"'{source}/no' does not exist" in line


def test_mount_unreadable_source_is_named(tmp_path: Path, point: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed (Debian package util-linux)")
        # Root reads everything by a capability; without it, a folder of somebody else's is closed to root too.
        os.chown(closed, 65534, 65534)
        before = (
            "setpriv",
            "--bounding-set=-dac_override,-dac_read_search",
            "--inh-caps=-dac_override,-dac_read_search",
        )
    else:
        closed.chmod(0)
    line = error_line(fusecache("mount", closed, point, state=tmp_path, before=before), USAGE)
    assert f"'{closed}' is not readable" in line


@needs_fuse
def test_mount_missing_mountpoint_is_named(tmp_path: Path, source: Path) -> None:
    line = error_line(fusecache("mount", source, tmp_path / "no", state=tmp_path), MOUNT)
    assert f"'{tmp_path}/no' does not exist; create it" in line


@needs_fuse
def test_mount_mountpoint_that_is_a_file_is_named(tmp_path: Path, source: Path) -> None:
    line = error_line(fusecache("mount", source, source / "photo.jpg", state=tmp_path), MOUNT)
    assert f"'{source}/photo.jpg' is not a folder" in line


@needs_fuse
def test_mount_mountpoint_that_is_not_empty_is_named(tmp_path: Path, source: Path) -> None:
    line = error_line(fusecache("mount", source, source, state=tmp_path), MOUNT)
    assert f"'{source}' is not empty (it holds 'photo.jpg')" in line


@needs_fuse
@needs_root
def test_mount_mountpoint_of_something_else_is_named(tmp_path: Path, source: Path, point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "other-thing", str(point)], check=True)
    try:
        line = error_line(fusecache("mount", source, point, state=tmp_path), MOUNT)
        umount_line = error_line(fusecache("umount", point, state=tmp_path), MOUNT)
        status_line = error_line(fusecache("status", point, state=tmp_path), MOUNT)
        assert is_mounted(point)
    finally:
        subprocess.run(["umount", str(point)], check=True)
    assert f"'{point}' has 'other-thing' (tmpfs) mounted on it" in line
    assert "use umount" in umount_line
    assert "not fusecache" in status_line


@needs_root
def test_mount_device_that_is_not_fuse_is_named(tmp_path: Path, source: Path, point: Path) -> None:
    (tmp_path / "empty").touch()
    script = 'mount --bind "$0" /dev/fuse && exec "$@"'
    before = (*own_mount_namespace(), "sh", "-c", script, str(tmp_path / "empty"))
    line = error_line(fusecache("mount", source, point, state=tmp_path, before=before), MOUNT)
    assert "/dev/fuse is not the FUSE device" in line
    assert "in a container add the device" in line


def test_check_device_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountpoint, "FUSE_DEVICE", tmp_path / "fuse")
    with pytest.raises(MountError, match=r"fuse is missing; load the module \(modprobe fuse\)"):
        mountpoint.check_device()


def test_check_device_without_fusermount_is_named_for_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not mountpoint.FUSE_DEVICE.exists():
        pytest.skip("there is no /dev/fuse")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MountError, match="fusermount3 is not in PATH; install the package fuse3"):
        mountpoint.check_device()


@needs_fuse
def test_mount_state_folder_that_can_not_be_made_is_named(tmp_path: Path, source: Path, point: Path) -> None:
    flag = ("--state-dir", str(source / "photo.jpg"))
    line = error_line(fusecache("mount", source, point, *flag, state=tmp_path), STATE)
    assert f"{source}/photo.jpg" in line


@needs_fuse
def test_mount_daemon_error_is_the_commands_own(tmp_path: Path, source: Path, point: Path) -> None:
    flags = ("--daemon", "--state-dir", str(source / "photo.jpg"), "--log-file", str(tmp_path / "log"))
    line = error_line(fusecache("mount", source, point, *flags, state=tmp_path), STATE)
    assert f"{source}/photo.jpg" in line


@needs_fuse
def test_mount_of_a_folder_that_is_mounted_elsewhere_says_what_to_do(tmp_path: Path, source: Path, point: Path) -> None:
    with Mount(str(source), tmp_path / "first", environment=environment(tmp_path)):
        line = error_line(fusecache("mount", source, point, "--log-level", "error", state=tmp_path), STATE)
    assert "a mount of the same folder; end that one, or give another --state-dir" in line


@needs_fuse
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_mount_daemon_that_is_ended_leaves_no_daemon(tmp_path: Path, point: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"alluxio://127.0.0.1:{silent.getsockname()[1]}/x"
        waiting = subprocess.Popen(
            [*command(), "mount", "--daemon", url, str(point)],
            env=environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        silent.settimeout(60)
        connection, _ = silent.accept()  # the daemon runs, and is not ready
        with connection:
            below = descendants(waiting.pid)
            waiting.send_signal(number)
            _, errors = waiting.communicate(timeout=60)
    assert errors == f"fusecache: ended by {number.name} before the mount was ready\n"
    assert waiting.returncode == 128 + number
    assert below
    until(lambda: not any(map(runs, below)), "nothing of the daemon is left")


@needs_fuse
def test_no_master_is_named_with_advice(tmp_path: Path, point: Path) -> None:
    url = "alluxio://127.0.0.1:1/data"
    extra = {"FUSECACHE_METADATA_BUDGET_S": "2", "FUSECACHE_LOG_LEVEL": "error"}
    for arguments in (("ls", url), ("mount", url, str(point))):
        line = error_line(fusecache(*arguments, state=tmp_path, extra=extra), UPSTREAM)
        assert "127.0.0.1:1" in line
        assert "fusecache doctor" in line


@needs_fuse
@pytest.mark.parametrize(("theirs", "ours"), [("nosasl", "simple"), ("simple", "nosasl")])
def test_wrong_password_scheme_is_named(tmp_path: Path, source: Path, point: Path, theirs: str, ours: str) -> None:
    extra = {"FUSECACHE_METADATA_BUDGET_S": "5", "FUSECACHE_LOG_LEVEL": "error"}
    with EmbeddedServer(source, tmp_path / "embedded", auth=theirs) as server:
        url = f"alluxio://{server.master_target}/"
        for arguments in (("ls", url), ("mount", url, str(point))):
            line = error_line(fusecache(*arguments, "--auth", ours, state=tmp_path, extra=extra), UPSTREAM)
            assert server.master_target in line
            assert "--auth" in line


def test_config_unknown_key_is_named_everywhere(tmp_path: Path, source: Path, point: Path) -> None:
    file = tmp_path / "fusecache.yaml"
    file.write_text(f"refesh_s: 5\nmounts:\n  - {{source: {source}, mountpoint: {point}}}\n")
    for arguments in (("serve",), ("mount", str(source), str(point)), ("config", "check"), ("status",)):
        line = error_line(fusecache(*arguments, "--config", file, state=tmp_path), USAGE)
        assert f"{file}: unknown key 'refesh_s'; did you mean 'refresh_s'?" in line


def test_config_wrong_value_is_named_by_its_flag_or_variable(tmp_path: Path, source: Path, point: Path) -> None:
    line = error_line(fusecache("mount", source, point, "--fetch-bytes", "4M", state=tmp_path), USAGE)
    assert "--fetch-bytes '4M': not a size; allowed: bytes, or a number with B, KiB" in line
    line = error_line(fusecache("status", state=tmp_path, extra={"FUSECACHE_STALL_S": "x"}), USAGE)
    assert "FUSECACHE_STALL_S 'x': not a duration" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("mont", "a", "b"), "unknown command 'mont'; did you mean 'mount'?"),
        (("mount", "/tmp"), "Missing argument 'MOUNTPOINT'; see `fusecache mount --help`"),
        (("mount", "--nonsense", "a", "b"), "No such option '--nonsense'"),
        (("mount", "--read-type", "x", "a", "b"), "'x' is not one of 'cache', 'no_cache'"),
        (("umount", "/tmp", "--timeout-s", "soon"), "'--timeout-s': 'soon': not a duration; allowed: seconds, or"),
        (("umount", "/tmp", "--timeout-s", "2h"), "'--timeout-s': '2h': allowed: 0 to 1h"),
        (("umount", ""), "'MOUNTPOINT': it is empty; give a path"),
        (("mount", "/tmp", "/mnt", "--refresh-s"), "requires an argument; see `fusecache mount --help`"),
        (("mount", "/tmp", "/mnt", "--refresh", "1"), "No such option '--refresh' (did you mean one of"),
        (("mount", "/tmp", "/mnt", "--log-file", "/x"), "--log-file '/x' is for --daemon"),
        (("log-level", "/mnt", "loud"), "'LEVEL': 'loud' is not one of 'debug', 'info', 'warning', 'error'"),
        (("mount", os.fsdecode(b"/caf\xe9"), "/mnt"), r"SOURCE '/caf\xe9' does not exist"),
        (("serve",), "serve needs a configuration file; give --config FILE"),
        (("refresh", "/proc"), "'/proc' does not lie in a mount of fusecache"),
        (("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (("status", "--config", "/no/such.yaml"), "'/no/such.yaml' can't be read: No such file or directory"),
        (("embedded", "/no/such"), "FOLDER '/no/such' does not exist; give a folder that does"),
        (("embedded", "/tmp", "--block-size-bytes", "0"), "'--block-size-bytes': '0': allowed: 1 to"),
        (("embedded", "/tmp", "--block-size-bytes", "1M"), "'1M': not a size"),
        (("embedded", "/tmp", "--faults", "/no/such.yaml"), "'/no/such.yaml' can't be read: No such file or directory"),
        (("doctor", "hdfs://x/y"), "'hdfs'"),
    ],
)
def test_command_line_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    assert named in error_line(fusecache(*arguments, state=tmp_path), USAGE)


def test_serve_file_without_mounts_is_named(tmp_path: Path) -> None:
    file = tmp_path / "fusecache.yaml"
    file.write_text("refresh_s: 5\n")
    assert f"{file} has no mounts" in error_line(fusecache("serve", "--config", file, state=tmp_path), USAGE)


def test_status_and_log_level_of_no_mount_are_named(tmp_path: Path) -> None:
    assert f"'{tmp_path}' is not mounted" in error_line(fusecache("status", tmp_path, state=tmp_path), MOUNT)
    line = error_line(fusecache("log-level", tmp_path, "debug", state=tmp_path), MOUNT)
    assert f"'{tmp_path}' is no mount of fusecache" in line


def test_mountpoint_that_its_user_may_not_read_is_waited_for(tmp_path: Path) -> None:
    """As root makes it: closed while nothing is mounted there. Whether it can be read is not asked."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    without = "-dac_override,-dac_read_search"
    before = ("setpriv", f"--bounding-set={without}", f"--inh-caps={without}") if os.geteuid() == 0 else ()
    if before and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (Debian package util-linux)")
    if before:
        os.chown(closed, 65534, 65534)
    line = error_line(fusecache("wait", closed, "--timeout-s", "0", state=tmp_path, before=before), 5)
    assert "nothing is mounted there" in line
    closed.chmod(0o700)


def test_wait_for_nothing_ends_in_time(tmp_path: Path) -> None:
    line = error_line(fusecache("wait", tmp_path, "--timeout-s", "0.3", state=tmp_path), 5)
    assert f"'{tmp_path}' is not ready after 0.3 s: nothing is mounted there" in line


def test_umount_of_nothing_is_fine(tmp_path: Path) -> None:
    done = fusecache("umount", tmp_path, state=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: not mounted\n")


def test_bug_is_a_traceback_and_exit_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError(name)

    monkeypatch.setattr("fusecache.cli.main.importlib.import_module", broken)
    assert main(["version"]) == 70
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert errors.splitlines()[-1] == "fusecache: this is a bug in fusecache; the traceback above says where"
