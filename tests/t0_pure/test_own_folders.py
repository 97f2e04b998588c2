"""Whose folders a mount takes: its own, no link, nobody else's, and none that others can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon import gated
from fusecache.daemon.machine_checks import check_parts
from fusecache.daemon.own_folders import agent_folder, identity_of, metadata_folder, prepare_folders
from fusecache.errors import StateError, UsageError
from fusecache.private_folder import make_for, prepare_shared_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_shared_folder_is_made_for_others_to_enter_whatever_the_umask(tmp_path: Path, narrow_umask: None) -> None:
    prepare_shared_folder(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a") == mode_of(tmp_path / "a" / "b") == 0o755


def test_folder_that_can_not_be_made_is_told_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    advice = r"file/a can't be made: Not a directory; give another --state-dir or --runtime-dir"
    with pytest.raises(StateError, match=advice):
        prepare_shared_folder(tmp_path / "file" / "a")


def test_shared_folder_that_nobody_else_needs_stays_closed(tmp_path: Path) -> None:
    prepare_shared_folder(tmp_path / "a", entered_by_others=False)
    assert mode_of(tmp_path / "a") == 0o700


def test_shared_folder_of_ours_is_opened_to_be_entered_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    prepare_shared_folder(tmp_path / "a", entered_by_others=False)
    assert mode_of(tmp_path / "a") == 0o700
    prepare_shared_folder(tmp_path / "a")
    assert mode_of(tmp_path / "a") == 0o711


def a_link(folder: Path) -> None:
    folder.with_name("real").mkdir()
    folder.symlink_to("real")


def a_dead_link(folder: Path) -> None:
    folder.symlink_to("nowhere")


def a_file(folder: Path) -> None:
    folder.write_bytes(b"")


def another_users(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 65_533, 65_533)


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def writable_by_the_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o775)


def plan_with(settings: Settings, mountpoint: Path) -> MountPlan:
    return MountPlan(cluster=None, folder=mountpoint, path=b"/", mountpoint=mountpoint, settings=settings)


@pytest.mark.parametrize("setting", ["state_dir", "runtime_dir"])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (a_link, "is a symbolic link; name the folder itself"),
        (a_dead_link, "is a symbolic link; name the folder itself"),
        (a_file, "is not a folder"),
        pytest.param(another_users, "belongs to uid 65533, not to 0", marks=needs_root),
        (writable_by_all, "has mode 0777: others could replace what is in it"),
        (writable_by_the_group, "has mode 0775: others could replace what is in it"),
    ],
)
def test_f18_a_folder_that_somebody_else_may_have_a_hand_in_is_refused(
    tmp_path: Path, setting: str, make: Callable[[Path], None], why: str
) -> None:
    """S39; F18."""
    folder = tmp_path / setting
    make(folder)
    chosen = {"state_dir": tmp_path / "s", "runtime_dir": tmp_path / "r", setting: folder}
    with pytest.raises(StateError) as failure:
        prepare_folders(plan_with(Settings.model_validate(chosen), tmp_path / "mnt"))
    assert str(folder) in str(failure.value)
    assert why in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_sticky_folder_of_roots_will_do(tmp_path: Path) -> None:
    """Nobody can take another's entry out of it: /tmp."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t").chmod(0o1777)
    prepare_shared_folder(tmp_path / "t")


@needs_root
def test_a_folder_is_made_for_another_user_and_found_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_for(tmp_path / "f", 65_533, 65_532)
        status = (tmp_path / "f").stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65_533, 65_532, 0o700)


@needs_root
def test_an_empty_folder_of_ours_is_what_a_killed_start_left(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o700)
    make_for(tmp_path / "f", 65_533, 65_533)
    assert (tmp_path / "f").stat().st_uid == 65_533


@needs_root
def test_a_folder_with_content_is_not_given_away(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o700)
    (tmp_path / "f" / "x").write_bytes(b"")
    with pytest.raises(StateError, match="belongs to uid 0, not to 65533"):
        make_for(tmp_path / "f", 65_533, 65_533)
    assert (tmp_path / "f").stat().st_uid == 0


@needs_root
def test_f18_a_link_is_not_followed_to_give_something_away(tmp_path: Path) -> None:
    """F18: whoever could put a link there would be given what it names."""
    (tmp_path / "roots").mkdir(mode=0o700)
    (tmp_path / "f").symlink_to("roots")
    with pytest.raises(StateError, match="symbolic link"):
        make_for(tmp_path / "f", 65_533, 65_533)
    assert (tmp_path / "roots").stat().st_uid == 0


def test_f18_a_link_that_takes_the_place_of_a_new_folder_gives_nobody_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between mkdir(2) and chmod(2), by somebody who may write above it."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    make = Path.mkdir

    def make_and_lose(folder: Path, mode: int = 0o777) -> None:
        make(folder, mode)
        folder.rmdir()
        folder.symlink_to(secret)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with pytest.raises(StateError, match="symbolic link"):
        prepare_shared_folder(tmp_path / "state")
    assert mode_of(secret) == 0o600


def test_f18_what_the_other_user_leaves_among_the_sockets_is_no_obstacle(tmp_path: Path) -> None:
    """It is its folder; a start has to come past a folder, or a link, with a socket's name."""
    (tmp_path / "agent-folder.sock").mkdir()
    (tmp_path / "agent-link.sock").symlink_to("nowhere")
    (tmp_path / "agent-file.sock").touch()
    made = gated._agent_socket(tmp_path)
    assert made.parent == tmp_path
    assert not made.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-folder.sock"]


def test_each_user_has_folders_of_its_own(tmp_path: Path) -> None:
    """So that a changed run_as_user meets nothing that is another's."""
    control = tmp_path / "m" / "control.sock"
    users = (None, 5, 6)
    settings = [Settings(state_dir=tmp_path, run_as_user=user) for user in users]
    assert [metadata_folder(one).name for one in settings] == ["metadata", "metadata-5", "metadata-6"]
    assert [agent_folder(control, one).name for one in settings] == ["private", "private-5", "private-6"]


@needs_root
def test_identity_is_what_the_settings_say() -> None:
    assert identity_of(Settings()) is None
    assert identity_of(Settings(run_as_user=5)) == (5, 5)
    assert identity_of(Settings(run_as_user=5, run_as_group=6)) == (5, 6)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"run_as_group": 5}, "run_as_group 5 is for workers with a run_as_user"),
        ({"run_as_user": 5, "open_mode": "classic"}, "run_as_user 5: open_mode classic has one process"),
    ],
)
def test_what_can_not_be_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        identity_of(Settings.model_validate(settings))


@pytest.mark.parametrize(
    ("capabilities", "verdict"), [([], "ok"), (["net_raw"], "warn")], ids=["no capability", "capabilities"]
)
def test_doctor_judges_the_parts_that_read_what_the_network_sends(capabilities: list[str], verdict: str) -> None:
    rights = {"uid": 5, "gid": 5, "capabilities": capabilities, "no_new_privileges": True}
    root = {"uid": 0, "gid": 0, "capabilities": ["sys_admin"], "no_new_privileges": True}
    parts = [
        {"name": "gate", "rights": root},
        {"name": "worker 0", "rights": rights},
        {"name": "agent", "rights": None},
    ]
    (check,) = check_parts(parts)
    assert check.verdict == verdict
    assert "uid 5" in check.found
    assert bool(check.advice) == (verdict == "warn")
    assert list(check_parts(())) == []
