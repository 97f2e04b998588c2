"""What another reading of the configuration means: for one mount by its command, for those of `serve` by the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.config.load import load
from fusecache.config.mount_command import MountCommand, present_folder
from fusecache.daemon.serve_plans import changes, plans
from fusecache.errors import UsageError


def command(folder: Path) -> MountCommand:
    return MountCommand(
        Path("fusecache.yaml"), {"workers": "3"}, source="./photos", mountpoint=folder / "mnt", folder=folder
    )


def test_a_command_is_read_again_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names too; flags win as they did, and the environment is the one that there is."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "fusecache.yaml").write_text("workers: 1\nrefresh_s: 5m\n")
    monkeypatch.chdir("/")
    plan = command(tmp_path).plan_again({"FUSECACHE_FETCH_BYTES": "1MiB"})
    assert plan.folder == tmp_path / "photos"
    assert (plan.settings.workers, plan.settings.refresh_s, plan.settings.fetch_bytes) == (3, 300.0, 1 << 20)
    (tmp_path / "fusecache.yaml").write_text("refresh_s: 1m\n")
    os.chdir("/")
    assert command(tmp_path).plan_again({}).settings.refresh_s == 60.0


def test_a_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert present_folder() == folder
    folder.rmdir()
    assert present_folder() == Path("/")
    with pytest.raises(UsageError, match=f"'{folder}', in which the mount was started, can't be entered: No such file"):
        command(folder).plan_again({})


def test_changes_are_what_differs_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "fusecache.yaml"
    for name in "abcd":
        (tmp_path / name).mkdir()

    def wanted(*rows: str) -> dict[Path, str]:
        file.write_text("\n".join(["mounts:", *(f"  - {{{row}}}" for row in rows), ""]))
        return {point: mount.source for point, mount in plans(load(file, {}, {})).items()}

    def row(name: str, more: str = "") -> str:
        return f"source: {tmp_path / name}, mountpoint: /mnt/{name}{more}"

    wanted(row("a"), row("b"), row("c"))
    running = {point: mount.plan for point, mount in plans(load(file, {}, {})).items()}
    assert wanted(row("d"), row("c", ", workers: 3"), row("a")) == {
        Path(f"/mnt/{name}"): str(tmp_path / name) for name in "dca"
    }
    found = changes(running, plans(load(file, {}, {})))
    assert found.started == (Path("/mnt/d"),)
    assert found.replaced == (Path("/mnt/c"),)
    assert found.ended == (Path("/mnt/b"),)
    # A setting of all mounts is a change of each, unless it is one of `serve` itself.
    file.write_text("metrics_address: 127.0.0.1:1\n" + file.read_text())
    assert changes(running, plans(load(file, {}, {}))) == found
    file.write_text("silent_s: 9\n" + file.read_text())
    assert changes(running, plans(load(file, {}, {}))).replaced == (Path("/mnt/c"), Path("/mnt/a"))
