"""Workers and agent as a user without rights (`run_as_user`): that it costs no request anything.

    python -m perf.micro.privileges [flags of perf.bench]

In both modes behind the gate; each mount is compared with one of the same mode that stays root. Needs a Python that
other users may execute, and has its data in a folder that they can enter.
"""

from __future__ import annotations

import sys

import pytest

from perf import bench
from perf.systems import SystemMaker, with_flags
from perf.tables import Table, of_setting
from tests.support.reachable import STRANGER, reachable_folder, run_by_python_for_all

MODES = ("no-open", "passthrough")
RUN_AS = ("--run-as-user", str(STRANGER), "--run-as-group", str(STRANGER))


def variants(mode: str) -> dict[str, SystemMaker]:
    """A mount that stays root, and one whose parts become somebody else."""
    return {
        f"{mode}, root": with_flags("--open-mode", mode),
        f"{mode}, without rights": with_flags("--open-mode", mode, *RUN_AS),
    }


def table(mode: str) -> Table:
    """The rows of the kernel path."""
    names = tuple(variants(mode))
    title = f"Workers and agent without rights (run_as_user), mode {mode}"
    return of_setting(f"privileges-{mode}", title, names, names[0])


def main() -> int:
    """Both modes, one after the other."""
    code = 0
    for mode in MODES:
        with reachable_folder() as folder, run_by_python_for_all():
            arguments = ["--work-dir", str(folder), *sys.argv[1:]]
            code = max(code, bench.run(arguments, table(mode), variants(mode)))
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as missing:
        sys.exit(f"privileges: {missing}")
