"""A mount as it was asked for on the command line: what is read again when it is reloaded.

Holds texts and names, not what they mean: the plan is made anew from the file, the environment and the flags each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fusecache.config.load import load
from fusecache.config.settings import MountPlan
from fusecache.errors import UsageError


def present_folder() -> Path:
    """The folder that this process is in; `/` where that was removed: nothing relative can be meant then."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


class MountCommand(NamedTuple):
    """See the module."""

    file: Path | None
    """The configuration file of the command line; None: the environment may name one."""

    flags: Mapping[str, Any]
    """Settings and keys of a cluster -> what was typed."""

    source: str
    mountpoint: Path
    folder: Path
    """Where the command was given: relative names begin here."""

    def plan(self, environment: Mapping[str, str]) -> MountPlan:
        """What it means, for a process in `folder`. UsageError names the file, variable or flag that is wrong."""
        return load(self.file, environment, self.flags).plan(self.source, self.mountpoint)

    def plan_again(self, environment: Mapping[str, str]) -> MountPlan:
        """What it means now. Goes to `folder` for that, and leaves this process there. UsageError."""
        try:
            os.chdir(self.folder)
        except OSError as failure:
            raise UsageError(
                f"the folder {str(self.folder)!r}, in which the mount was started, can't be entered: {failure.strerror}"
            ) from None
        return self.plan(environment)
