"""What is built once is whole or not there, and is built by one run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import binaries


def programs(folder: Path, names: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def test_a_half_built_folder_is_built_again_and_a_whole_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[Path] = []

    def build(ready: Path) -> None:
        built.append(ready)
        programs(ready, binaries.PROGRAMS)

    monkeypatch.setattr(binaries, "build", build)
    programs(tmp_path / "fusecache" / f"kubernetes-{binaries.VERSION}", binaries.PROGRAMS[1:])
    ready = binaries.folder()
    assert built == [ready]
    assert binaries.folder() == ready
    assert built == [ready]


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(binaries, "PROGRAMS", ("no-such-program",))
    monkeypatch.setenv("GOPROXY", "off")
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    with pytest.raises(RuntimeError, match="go build"):
        binaries.folder()
    assert [path.name for path in (tmp_path / "fusecache").iterdir() if path.is_dir()] == []
