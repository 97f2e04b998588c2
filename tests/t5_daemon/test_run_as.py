"""Whole mounts whose workers and agent are another user: what they can read, whose the folders are, what is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.kernel.probe import probe
from tests.support.command import error_line, fusecache
from tests.support.kills import kill
from tests.support.mounting import needs_fuse
from tests.support.reachable import STRANGER, as_user, needs_root, reachable_folder, run_by_python_for_all
from tests.support.readers import Load
from tests.support.upgrades import Upgrades
from tests.t4_mount.board import MEMORY
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, eventually, live_mount

USER = 64_001
RUN_AS = ("--run-as-user", str(USER))
CONTENT = bytes(range(256)) * 1024

pytestmark = [
    needs_fuse,
    needs_root,
    pytest.mark.usefixtures("python_for_all"),
    pytest.mark.skipif(not probe().usable("mount"), reason=f"no mount(2) here: {probe()['mount'].why}"),
]


def filled(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        (folder / f"f{number}").write_bytes(CONTENT[number:])
    return folder


@pytest.fixture
def source(reachable: Path) -> Path:
    return filled(reachable / "source")


class Shared(NamedTuple):
    """A mount of a folder that tests share."""

    source: Path
    base: Path
    mount: LiveMount

    def command(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """`fusecache COMMAND MOUNTPOINT`."""
        place = ("--runtime-dir", self.mount.runtime_dir)
        return fusecache(*arguments, self.mount.root, *place, state=self.base, before=before)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with run_by_python_for_all(), reachable_folder() as folder:
        source = filled(folder / "source")
        (source / "f0").chmod(0o600)
        with live_mount(source, folder / "m", *RUN_AS) as mount:
            yield Shared(source, folder / "m", mount)


@pytest.fixture
def server(source: Path, reachable: Path) -> Iterator[EmbeddedProcess]:
    """A block worker whose files root alone can read; they are copies, as in memory nothing links to the disk."""
    state = MEMORY / reachable.name
    with EmbeddedProcess(source, state, "--block-size-bytes", "1MiB") as running:
        yield running
    subprocess.run(["rm", "-r", str(state)], check=True)


def block_files(server_state: Path) -> list[Path]:
    return [path for path in server_state.rglob("alluxioworker/*") if path.is_file()]


def reread(mount: LiveMount, name: str) -> None:
    """Past the kernel's pages."""
    descriptor = os.open(mount.root / name, os.O_RDONLY | os.O_DIRECT)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        assert file.read(4096) == (CONTENT[int(name[1:]) :])[:4096]


def may_read(path: Path) -> bool:
    return as_user(USER, ["cat", path]).returncode == 0


def test_block_files_that_the_user_may_not_read_come_through_the_block_worker(
    server: EmbeddedProcess,
    reachable: Path,
) -> None:
    """S38; and those that it may read are read without a call, the kernel itself reads them too."""
    state = MEMORY / reachable.name
    (tier,) = state.rglob("tier0")
    flags = ("--open-mode", "passthrough", "--immutable", "--tier-folder", str(tier))
    with live_mount(server.url, reachable / "m", *flags, *RUN_AS) as mount:
        for number in range(4):
            assert (mount.root / f"f{number}").read_bytes() == CONTENT[number:]
        eventually(lambda: len(block_files(state)) == 4, "the block worker has stored what was read")
        assert not any(map(may_read, block_files(state))), "they can be read, or the test shows nothing"
        before = mount.sources()
        reread(mount, "f0")
        assert mount.sources().get("local_block", 0) == before.get("local_block", 0) == 0
        assert mount.passthrough_opens() == 0
        for path in (state, *state.rglob("*")):
            path.chmod(path.stat().st_mode | (0o011 if path.is_dir() else 0o044))
        assert all(map(may_read, block_files(state)))
        reread(mount, "f1")
        eventually(lambda: passed_through(mount, "f2"), "the gate takes files from a worker without rights")


def passed_through(mount: LiveMount, name: str) -> bool:
    before = mount.passthrough_opens()
    assert (mount.root / name).read_bytes() == CONTENT[int(name[1:]) :]
    return mount.passthrough_opens() > before


def test_a_folder_source_is_served_and_only_workers_and_agent_are_the_user(shared: Shared) -> None:
    """S38: the embedded server stays who mounts, because it reads the user's files."""
    mount = shared.mount
    assert (mount.root / "f0").read_bytes() == CONTENT
    rights = {part["name"]: part["rights"] for part in mount.status()["parts"] if part["rights"]}
    theirs = {name for name, found in rights.items() if found["uid"] == USER}
    assert theirs == {"agent", "worker 0", "worker 1"}
    assert not any(rights[name]["capabilities"] for name in theirs)
    # What is shown as the owner of files is what it was: nobody, not whoever the workers are.
    assert (mount.root / "f1").stat().st_uid == 65_534


def test_what_workers_and_agent_write_is_theirs_and_nothing_else(shared: Shared) -> None:
    """S38, S39: they can't replace the control socket, or what decides who may mount there."""
    base, root = shared.base, shared.mount.root
    owned = {path: path.lstat().st_uid for path in base.rglob("*") if root not in path.parents}
    control = next(path for path in owned if path.name == "control.sock")
    assert owned[control] == owned[control.parent] == owned[base / "run"] == owned[base / "state"] == 0
    assert stat.S_IMODE(control.stat().st_mode) == 0o666
    private, metadata = control.with_name(f"private-{USER}"), base / "state" / f"metadata-{USER}"
    theirs = {path for path, uid in owned.items() if uid == USER}
    assert {private, metadata} <= theirs
    assert all({private, metadata} & {path, *path.parents} for path in theirs)
    assert stat.S_IMODE(private.stat().st_mode) == stat.S_IMODE(metadata.stat().st_mode) == 0o700


def test_the_control_socket_takes_changes_from_root_and_from_no_stranger(
    shared: Shared, expected_logs: Callable[..., None]
) -> None:
    expected_logs("control_request_refused", count=1)
    (shared.source / "later").write_bytes(b"later")
    assert shared.command("refresh").returncode == 0
    assert (shared.mount.root / "later").read_bytes() == b"later"
    stranger = ["setpriv", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    shown = shared.command("status", before=stranger)
    assert shown.returncode == 0, shown.stderr
    rows = {row[:2]: row for row in (tuple(line.split()) for line in shown.stdout.splitlines())}
    assert [row[-2:] for head, row in rows.items() if head[:1] == ("worker",)] == [(f"{USER}:{USER}", "none")] * 2
    refused = error_line(shared.command("refresh", before=stranger), 3)
    assert f"refresh is for root and the user who mounted, not for uid {STRANGER}" in refused
    shared.mount.mount.copy_stderr()


def test_an_agent_that_is_started_again_serves_the_same_control_socket(
    shared: Shared, expected_logs: Callable[..., None]
) -> None:
    """S35: it has no right to the socket's folder; the socket is still there."""
    expected_logs("the agent ended", count=1)
    kill(shared.mount, "agent")
    eventually(lambda: shared.mount.answers(), "it is ready again")
    (shared.source / "even later").write_bytes(b"even later")
    shared.mount.refresh()
    assert (shared.mount.root / "even later").read_bytes() == b"even later"
    shared.mount.mount.copy_stderr()


def test_doctor_tells_whose_the_processes_are(shared: Shared) -> None:
    def rows(*arguments: str) -> dict[str, str]:
        done = fusecache("doctor", *arguments, state=shared.base, extra={"COLUMNS": "200"})
        checks = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("rights ")]
        return dict(checks)

    assert rows()["rights"].startswith("warn")
    assert rows(*RUN_AS)["rights"].startswith("ok")
    running = shared.command("doctor").stdout
    assert f"workers and agent (uid {USER}) have no capability" in " ".join(running.split())


def test_another_user_at_the_next_start_is_no_obstacle(source: Path, reachable: Path) -> None:
    """What exists stays whose it is; each user has metadata of its own."""
    base = reachable / "m"
    users = (64_001, None)
    for user in users:
        flags = () if user is None else ("--run-as-user", str(user))
        with live_mount(source, base, *flags) as mount:
            assert (mount.root / "f1").read_bytes() == CONTENT[1:]
    folders = {path.name: path.stat().st_uid for path in (base / "state").glob("metadata*")}
    assert folders == {"metadata" if user is None else f"metadata-{user}": user or 0 for user in users}


@pytest.mark.long
def test_an_upgrade_takes_rights_away_while_files_are_read(
    source: Path, reachable: Path, expected_logs: Callable[..., None]
) -> None:
    """S38, S42: the way from a node whose workers are root to one whose are not, and back."""
    # The embedded server of a folder is away while its mount changes hands.
    expected_logs("block worker failed|master does not answer|block worker list not refreshed", optional=True)
    names = sorted(os.listdir(source))
    with Upgrades(str(source), reachable) as mount:
        mount.start()
        with Load(mount.mountpoint, source, names, processes=2) as load:
            for flags, user in ((RUN_AS, USER), ((), 0)):
                load.wait_for_calls(50)
                mount.start(*flags)
                found = fusecache("status", mount.mountpoint, "--json", state=reachable)
                parts = {part["name"]: part for part in json.loads(found.stdout)["parts"]}
                assert {parts[name]["rights"]["uid"] for name in ("agent", "worker 0", "worker 1")} == {user}
            load.wait_for_calls(50)
            report = load.stop()
        assert report.errors == [], report.describe()
        assert report.wrong == [], report.describe()
        mount.end()


def test_a_mount_point_that_the_user_can_not_reach_is_no_obstacle(source: Path, reachable: Path) -> None:
    """Nothing of workers and agent goes through the mount point."""
    closed = reachable / "closed"
    closed.mkdir(mode=0o700)
    state, runtime = reachable / "state", reachable / "run"
    place = closed / "mnt"
    place.mkdir()
    assert as_user(USER, ["ls", place]).returncode != 0
    flags = ("--state-dir", state, "--runtime-dir", runtime, *RUN_AS)
    done = fusecache("mount", "--daemon", source, place, *flags, state=reachable)
    try:
        assert done.returncode == 0, done.stderr
        assert (place / "f1").read_bytes() == CONTENT[1:]
    finally:
        assert fusecache("umount", place, state=reachable).returncode == 0


def test_a_state_folder_that_the_user_can_not_reach_is_named(source: Path, reachable: Path) -> None:
    closed = reachable / "closed"
    closed.mkdir(mode=0o700)
    (reachable / "mnt").mkdir()
    flags = ("--state-dir", closed / "a" / "state", *RUN_AS)
    line = error_line(fusecache("mount", source, reachable / "mnt", *flags, state=reachable), 4)
    assert f"folder {closed}/a/state/metadata-{USER} can't be used by uid {USER} (run_as_user)" in line


@pytest.mark.parametrize(
    ("before", "flags", "why"),
    [
        (("setpriv", "--reuid", str(STRANGER), "--clear-groups"), RUN_AS, f"another user, and this is uid {STRANGER}"),
        ((), (*RUN_AS, "--open-mode", "classic"), "open_mode classic has one process, which mounts"),
        ((), ("--run-as-user", "0"), "--run-as-user '0'"),
        ((), ("--run-as-group", "5"), "run_as_group 5 is for workers with a run_as_user"),
        (("setpriv", "--bounding-set", "-setpcap"), RUN_AS, "this process lacks CAP_SETPCAP"),
        (("setpriv", "--bounding-set", "-sys_admin"), RUN_AS, "impossible here, where one process does all"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_in_one_line(
    source: Path,
    reachable: Path,
    before: tuple[str, ...],
    flags: tuple[str, ...],
    why: str,
) -> None:
    (reachable / "mnt").mkdir()
    done = fusecache("mount", source, reachable / "mnt", *flags, state=reachable, before=before)
    assert why in error_line(done, 2)
