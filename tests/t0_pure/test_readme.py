"""What the README says of commands, exit codes, targets and files is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache import errors
from fusecache.cli.main import COMMANDS, INTERRUPTED, UNREAD

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)


def test_readme_lists_every_command() -> None:
    listed = README.partition("## Commands\n\n```\n")[2].partition("```")[0]
    named = set(re.findall(r"^fusecache ([a-z-]+)|/ ([a-z-]+) SOURCE", listed, re.MULTILINE))
    assert {first or second for first, second in named} == set(COMMANDS)


def test_readme_tells_every_exit_code() -> None:
    told = README.partition("Exit codes: ")[2].partition(". A mount")[0]
    codes = {int(code) for code in re.findall(r"(?:^|,\s)(\d+) ", told)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    of_errors = {kind.exit_code for kind in kinds if issubclass(kind, errors.FusecacheError)}
    assert codes == {0, errors.UNEXPECTED, INTERRUPTED, UNREAD, *of_errors}


def test_readme_names_targets_that_are_there() -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert named
    assert named <= set(TARGETS)


def test_make_help_has_one_column_of_names() -> None:
    width = int(re.findall(r"make %-(\d+)s", MAKEFILE)[0])
    assert max(map(len, TARGETS)) <= width


def test_every_measurement_is_listed_where_one_looks() -> None:
    micro = (ROOT / "perf" / "micro" / "__init__.py").read_text(encoding="utf-8")
    assert set(re.findall(r"python -m perf\.micro\.([a-z_]+)", micro)) == {
        path.stem for path in (ROOT / "perf" / "micro").glob("[a-z]*.py")
    }
    table = (ROOT / "perf" / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "perf").glob("[a-z]*.py")} <= set(re.findall(r"`(\w+\.py)`", table))


@pytest.mark.parametrize("module", ["report", "idle"])
def test_measurement_explains_itself(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"perf.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("document", ["README.md", "deploy/README.md", "perf/README.md", "SEMANTICS.md"])
def test_files_that_a_document_links_to_are_there(document: str) -> None:
    folder = (ROOT / document).parent
    text = (ROOT / document).read_text(encoding="utf-8")
    linked = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:deploy|perf|tests|fusecache)/[A-Za-z0-9_./-]+)`", text)
    assert [name for name in linked if not (folder / name).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []
