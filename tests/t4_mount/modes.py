"""The ways a mount can be served, as this level runs them: every test in every one of them, with the same answers.

`pytest --open-modes classic,no-open` chooses. The masked ones are what an older kernel would lead to:
`auto` with the features masked that it lacks.
"""

from __future__ import annotations

import functools
import os
from typing import Literal, NamedTuple

from fusecache.kernel.features import Features
from fusecache.kernel.probe import probe

Served = Literal["classic", "no-open", "passthrough"]


class OpenMode(NamedTuple):
    """One way to serve."""

    name: str
    """In test ids."""
    flags: tuple[str, ...]
    served: Served
    """What the mount has to turn out to be."""

    @property
    def passthrough(self) -> bool:
        """Whether the kernel reads whole local blocks itself."""
        return self.served == "passthrough"

    @property
    def opens_reach_the_daemon(self) -> bool:
        """Whether OPEN and RELEASE of each file are requests of the daemon's."""
        return self.served == "classic"


MODES = {
    mode.name: mode
    for mode in (
        OpenMode("classic", ("--open-mode", "classic"), "classic"),
        OpenMode("no-open", ("--open-mode", "no-open"), "no-open"),
        OpenMode("passthrough", ("--open-mode", "passthrough"), "passthrough"),
        OpenMode("as-5.14", ("--open-mode", "auto", "--kernel-features", "as-5.14"), "no-open"),
        OpenMode("as-6.6", ("--open-mode", "auto", "--kernel-features", "as-6.6"), "no-open"),
    )
}

DEFAULT = ("no-open",) if os.geteuid() == 0 else ("classic",)
"""What `make test` has time for: what a mount of small files is by default, for this user. `make test-modes` runs the
others."""


def chosen(names: str | None) -> list[OpenMode]:
    """The modes of `--open-modes`; KeyError's text names an unknown one."""
    return [MODES[name.strip()] for name in (names.split(",") if names else DEFAULT)]


@functools.cache
def _features() -> Features:
    return probe()


def unavailable(mode: OpenMode) -> str | None:
    """Why nothing can be mounted in this mode here, in words; None when it can."""
    if mode.served == "classic":
        return None
    for needed in ("mount", *(("passthrough",) if mode.passthrough else ())):
        if not _features().usable(needed):
            return f"open mode {mode.name}: {_features()[needed].why}"
    return None
