"""pyproject.toml and the locks agree, and the locks can be installed by anybody."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = {
    "requirements.lock": PROJECT["dependencies"],
    "requirements-dev.lock": PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"],
    "requirements-bench.lock": PROJECT["dependencies"] + PROJECT["optional-dependencies"]["bench"],
}


def pins(lock: str) -> dict[str, str]:
    """Name and version of every package in a lock; each must carry a hash."""
    found = {}
    for entry in re.split(r"\n(?=[a-z0-9])", (ROOT / lock).read_text()):
        if match := re.match(r"([\w.-]+)==([\w.!+]+)", entry):
            assert "--hash=sha256:" in entry, f"{match[1]} has no hash in {lock}"
            found[canonicalize_name(match[1])] = match[2]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_fits_pyproject(lock: str) -> None:
    found = pins(lock)
    for text in LOCKS[lock]:
        requirement = Requirement(text)
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {lock}: run make lock"
        assert requirement.specifier.contains(version), f"{lock} pins {requirement.name} {version}, not {text}"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_address(lock: str) -> None:
    assert not re.search(r"https?://|--index-url|--find-links|--trusted-host", (ROOT / lock).read_text())


@pytest.mark.parametrize("lock", ["requirements-dev.lock", "requirements-bench.lock"])
def test_locks_pin_the_same_run_time_versions(lock: str) -> None:
    other = pins(lock)
    assert {name: other.get(name) for name in pins("requirements.lock")} == pins("requirements.lock")


def test_every_dependency_has_its_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    block = lines[start + 1 : lines.index("]", start)]
    for above, line in zip(["", *block], block, strict=False):
        if line.strip().startswith('"'):
            assert above.strip().startswith("#"), f"no comment above {line.strip()}"
