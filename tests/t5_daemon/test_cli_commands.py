"""The commands as people and programs use them: on a running mount, and alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import fusecache as package
from fusecache.cli.main import COMMANDS
from fusecache.daemon.control_client import socket_path
from tests.support import log_noise
from tests.support.command import ROOT, environment, fusecache
from tests.support.mounting import Mount, command, is_mounted, needs_fuse

BLOCK = 1 << 16


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State, sockets, source and mount point of this module's mount."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "source" / "train").mkdir(parents=True)
    (folder / "source" / "photo.jpg").write_bytes(b"bytes")
    return folder


@pytest.fixture(scope="module")
def mount(folder: Path) -> Iterator[Mount]:
    with Mount(str(folder / "source"), folder / "mnt", environment=environment(folder)) as running:
        done = fusecache("wait", running.mountpoint, "--timeout-s", "60", state=folder)
        assert (done.returncode, done.stdout) == (0, f"{running.mountpoint}: ready\n")
        yield running


@needs_fuse
def test_status_of_one_mount(mount: Mount, folder: Path) -> None:
    state = as_json(fusecache("status", mount.mountpoint, "--json", state=folder))
    assert (state["state"], state["pid"], state["source"]) == ("ready", mount.pid, mount.source)
    text = fusecache("status", mount.mountpoint, state=folder).stdout
    assert "ready" in text
    assert str(mount.pid) in text
    assert not re.search(r"\bNone\b|\[\]", text), "for people, not Python's"


@needs_fuse
def test_status_tells_restarts_uptime_and_what_was_given_again(mount: Mount, folder: Path) -> None:
    state = as_json(fusecache("status", mount.mountpoint, "--json", state=folder))
    if not state.get("parts"):
        pytest.skip("one process alone serves in classic mode")
    assert all({"restarts", "uptime_s", "pid"} <= part.keys() for part in state["parts"])
    assert {"redelivered", "given_twice", "poisoned", "interrupted"} <= state["gate"].keys()
    text = fusecache("status", mount.mountpoint, state=folder).stdout
    for part in state["parts"]:
        (row,) = [line for line in text.splitlines() if line.startswith(f"{part['name']} ")]
        assert " s" in row
    assert re.search(
        r"given again +\d+ \(worker died\), \d+ \(worker blocked\); \d+ given up, \d+ interrupted, \d+ timed out", text
    )


@needs_fuse
def test_status_of_all_mounts_has_this_one_in_one_row(mount: Mount, folder: Path) -> None:
    states = as_json(fusecache("status", "--json", state=folder))
    assert [state["state"] for state in states if state["mountpoint"] == str(mount.mountpoint)] == ["ready"]
    rows = [line for line in fusecache("status", state=folder).stdout.splitlines() if str(mount.mountpoint) in line]
    assert len(rows) == 1
    assert rows[0].split()[:3] == [str(mount.mountpoint), mount.source, "ready"]


@needs_fuse
def test_status_with_another_runtime_dir_finds_the_socket_through_the_mount(mount: Mount, folder: Path) -> None:
    elsewhere = ("--runtime-dir", str(folder / "elsewhere"))
    state = as_json(fusecache("status", mount.mountpoint, "--json", *elsewhere, state=folder))
    assert (state["state"], state["pid"]) == ("ready", mount.pid)
    assert fusecache("wait", mount.mountpoint, *elsewhere, state=folder).returncode == 0


@needs_fuse
def test_refresh_shows_what_another_program_wrote(mount: Mount, folder: Path) -> None:
    assert os.listdir(mount.mountpoint / "train") == []
    (folder / "source" / "train" / "new.jpg").write_bytes(b"new")
    done = as_json(fusecache("refresh", mount.mountpoint / "train", "--json", state=folder))
    assert done["folders"] == 1
    assert done["changed"] >= 1
    assert (mount.mountpoint / "train" / "new.jpg").read_bytes() == b"new"


@needs_fuse
def test_log_level_changes_while_it_runs(mount: Mount, folder: Path) -> None:
    for level in ("debug", "warning"):
        assert fusecache("log-level", mount.mountpoint, level, state=folder).returncode == 0
        assert as_json(fusecache("status", mount.mountpoint, "--json", state=folder))["log_level"] == level


@needs_fuse
def test_ls_and_stat_of_a_mounted_folder_ask_the_mounts_server(mount: Mount, folder: Path) -> None:
    (mount.mountpoint / "photo.jpg").read_bytes()
    done = fusecache("ls", mount.source, "--json", state=folder)
    assert done.returncode == 0, done.stderr
    entries = {entry["path"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    assert entries["/photo.jpg"]["length_bytes"] == 5
    assert entries["/photo.jpg"]["in_alluxio_percent"] == 100.0
    assert entries["/train"]["kind"] == "folder"
    status = as_json(fusecache("status", mount.mountpoint, "--json", state=folder))
    root = as_json(fusecache("stat", mount.source, "--json", state=folder))
    assert root["cluster_id"] == status["cluster_id"]


@needs_fuse
def test_doctor_of_a_mount_finds_it_in_order(mount: Mount, folder: Path) -> None:
    report = as_json(fusecache("doctor", mount.mountpoint, "--json", state=folder))
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert report["ok"]
    assert verdicts["mount"] == verdicts["daemon"] == verdicts["cluster"] == verdicts["path"] == "ok"


@needs_fuse
def test_daemon_returns_once_reads_work(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "photo.jpg").write_bytes(b"bytes")
    (tmp_path / "mnt").mkdir()
    started = as_json(
        fusecache("mount", "--daemon", "--json", "source", "mnt", state=tmp_path, cwd=tmp_path)  # relative on purpose
    )
    try:
        assert started["mountpoint"] == str(tmp_path / "mnt")
        assert (tmp_path / "mnt" / "photo.jpg").read_bytes() == b"bytes"
        assert os.readlink(f"/proc/{started['pid']}/cwd") == "/"
        log = next((tmp_path / "state" / "logs").iterdir()).read_text()
        assert '"event": "mounted"' in log
    finally:
        done = fusecache("umount", tmp_path / "mnt", state=tmp_path)
    assert done.stdout == f"{tmp_path}/mnt: unmounted\n"
    pid_ended = subprocess.run(["tail", "--pid", str(started["pid"]), "-f", "/dev/null"], timeout=30, check=False)
    assert pid_ended.returncode == 0


@needs_fuse
def test_interrupt_unmounts(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    mount = Mount(str(tmp_path / "source"), tmp_path / "mnt", environment=environment(tmp_path))
    try:
        mount.start()
        assert mount.process is not None
        mount.process.send_signal(signal.SIGINT)
        assert mount.process.wait(30) == 0
        assert not is_mounted(mount.mountpoint)
    finally:
        mount.cleanup()


def test_interrupt_of_a_command_that_waits_for_a_server_is_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        waiting = subprocess.Popen(
            [*command(), "ls", f"alluxio://127.0.0.1:{silent.getsockname()[1]}/x"],
            env=environment(tmp_path),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            waiting.send_signal(signal.SIGINT)
            _, errors = waiting.communicate(timeout=30)
    assert (waiting.returncode, errors.strip()) == (130, "fusecache: interrupted")


@needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_changing_kinds_are_refused_to_another_user(tmp_path: Path, expected_logs: log_noise.Declare) -> None:
    expected_logs("control_request_refused", count=1)  # the second one of a kind is told later, with a count
    (tmp_path / "source").mkdir()
    requests = [{"kind": "refresh", "paths": [""]}, {"kind": "log_level", "level": "debug"}, {"kind": "status"}]
    script = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "os.chdir(os.path.dirname(sys.argv[1]))\n"  # before: the folders above are this user's alone
        "os.setuid(65534)\n"
        "s.connect(os.path.basename(sys.argv[1]))\n"
        "s.sendall(sys.stdin.buffer.read())\n"
        "s.shutdown(socket.SHUT_WR)\n"
        "sys.stdout.write(s.makefile().read())\n"
    )
    with Mount(str(tmp_path / "source"), tmp_path / "mnt", environment=environment(tmp_path)) as mount:
        assert fusecache("wait", mount.mountpoint, state=tmp_path).returncode == 0
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, str(socket_path(tmp_path / "run", mount.mountpoint))],
            input="".join(json.dumps(request) + "\n" for request in requests).encode(),
            capture_output=True,
            check=True,
        )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer.get("type") for answer in answers] == ["MountError", "MountError", None]
    assert answers[2]["ready"]


def test_embedded_serves_blocks_of_the_size_asked_for(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(os.urandom(2 * BLOCK + 1))
    server = subprocess.Popen(
        [*command(), "embedded", str(tmp_path / "source"), "--port", "0", "--block-size-bytes", "64KiB", "--json"],
        env=environment(tmp_path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        master = json.loads(server.stdout.readline())["master"]
        status = as_json(fusecache("stat", f"alluxio://{master}/big", "--json", state=tmp_path))
        assert [block["length_bytes"] for block in status["blocks"]] == [BLOCK, BLOCK, 1]
        report = json.loads(fusecache("doctor", f"alluxio://{master}/", "--json", state=tmp_path).stdout)
        sizes = next(check for check in report["checks"] if check["name"] == "block size")
        assert sizes["verdict"] == "warn"
        assert "1 have several blocks (of 64KiB)" in sizes["found"]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        server.stdout.close()


def test_doctor_of_a_cluster_that_does_not_answer_fails_with_1(tmp_path: Path) -> None:
    done = fusecache("doctor", "alluxio://127.0.0.1:1/x", "--json", state=tmp_path)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert [check["name"] for check in report["checks"] if check["verdict"] == "fail"][-1] == "master 127.0.0.1:1"
    assert all(check["advice"] for check in report["checks"] if check["verdict"] == "fail")


def test_config_show_tells_values_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "fusecache.yaml"
    file.write_text("refresh_s: 5m\nmounts:\n  - {source: /tmp, mountpoint: /mnt/x, immutable: true}\n")
    shown = as_json(
        fusecache(
            *("config", "show", "--config", str(file), "--mount", "/mnt/x", "--fetch-bytes", "8MiB", "--json"),
            state=tmp_path,
            extra={"FUSECACHE_STALL_S": "7"},
        )
    )
    assert shown["refresh_s"] == {"value": 300.0, "origin": str(file)}
    assert shown["immutable"] == {"value": True, "origin": f"{file}: mount /mnt/x"}
    assert shown["stall_s"] == {"value": 7.0, "origin": "FUSECACHE_STALL_S"}
    assert shown["fetch_bytes"] == {"value": 8 << 20, "origin": "--fetch-bytes"}
    assert shown["rpc_try_s"] == {"value": 30.0, "origin": "default"}
    assert "nothing wrong" in fusecache("config", "check", "--config", file, state=tmp_path).stdout


def test_every_command_teaches_with_an_example(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from fusecache.cli.main import cli

    for name in COMMANDS:
        result = CliRunner().invoke(cli, [name, "--help"])
        assert result.exit_code == 0, name
        assert f"fusecache {name}" in result.output.partition("Usage:")[2].partition("\n")[2], name
        if name not in ("config", "explain"):  # their sub-commands have them
            for flag in ("--json", "--config", "--log-level"):
                assert flag in result.output, (name, flag)


def test_mount_has_a_flag_for_every_setting(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from fusecache.cli.main import cli
    from fusecache.config.load import CLUSTER_KEYS, flag_name
    from fusecache.config.settings import Settings

    output = CliRunner().invoke(cli, ["mount", "--help"]).output
    for key in (*Settings.model_fields, *CLUSTER_KEYS):
        assert f"{flag_name(key)} " in output or f"{flag_name(key)}\n" in output, key


def test_serve_help_shows_a_file_that_loads(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from fusecache.cli.main import cli
    from fusecache.config.load import load

    output = CliRunner().invoke(cli, ["serve", "--help"]).output
    example = output.partition("  with\n")[2].partition("\nOptions:")[0]
    assert set(yaml.safe_load(example)) == {"metrics_address", "clusters", "mounts"}
    file = tmp_path / "example.yaml"
    file.write_text(example)
    assert len(load(file, {}, {}).mounts) == 2


def test_help_and_version_import_nothing_heavy() -> None:
    heavy = ("grpc", "pyfuse3", "trio", "pydantic", "structlog", "rich", "prometheus_client", "yaml", "lmdb")
    script = (
        "import sys\nfrom fusecache.cli.main import main\n"
        "codes = [main(['--help']), main(['version']), main(['completion', 'bash'])]\n"
        f"print([name for name in {heavy!r} if name in sys.modules], codes, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "[] [0, 0, 0]\n"


def test_version_is_the_packages(tmp_path: Path) -> None:
    assert as_json(fusecache("version", "--json", state=tmp_path))["version"] == package.__version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed_and_answers(tmp_path: Path, shell: str) -> None:
    script = fusecache("completion", shell, state=tmp_path).stdout
    assert f"_FUSECACHE_COMPLETE={shell}_complete" in script
    words = {"COMP_WORDS": "fusecache um", "COMP_CWORD": "um" if shell == "fish" else "1"}
    answer = fusecache(state=tmp_path, extra={"_FUSECACHE_COMPLETE": f"{shell}_complete", **words})
    assert "umount" in answer.stdout
    assert "mount\n" not in answer.stdout.replace("umount\n", "")


def test_completion_of_a_flag_of_mount(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "fusecache mount --refresh-", "COMP_CWORD": "2", "_FUSECACHE_COMPLETE": "bash_complete"}
    answer = fusecache(state=tmp_path, extra=words)
    assert {"plain,--refresh-s", "plain,--refresh-calls-per-s"} <= set(answer.stdout.split())
