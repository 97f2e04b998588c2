"""What `serve` is to run: the mounts of its configuration file, and what another reading of it changes. Starts none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fusecache.config.load import Configuration
from fusecache.config.settings import MountPlan
from fusecache.errors import UsageError


class Wanted(NamedTuple):
    """One mount."""

    source: str
    """As it stands in the file."""

    plan: MountPlan


def plans(configuration: Configuration) -> dict[Path, Wanted]:
    """Mount point -> the mount of the file that is to be there. UsageError for a wrong one, or when there is none."""
    if configuration.file is None:
        raise UsageError("serve needs a configuration file; give --config FILE")
    if not configuration.mounts:
        raise UsageError(f"{configuration.file} has no mounts; add `mounts:` with source and mountpoint")
    found = {}
    link = configuration.controller
    for mount in configuration.mounts:
        plan = configuration.plan_of(mount)
        # One address for all: the children answer through their control sockets.
        settings = plan.settings.model_copy(update={"metrics_address": None})
        report_interval_s = link.report_interval_s if link is not None else None
        plan = plan.model_copy(update={"settings": settings, "report_interval_s": report_interval_s})
        found[plan.mountpoint] = Wanted(mount.source, plan)
    return found


class Changes(NamedTuple):
    """Mount points, in the order of the file."""

    started: tuple[Path, ...]
    replaced: tuple[Path, ...]
    """Their mounts run, with other settings or from another source."""

    ended: tuple[Path, ...]
    """They are not in the file any more; also those that have ended by themselves."""


def changes(present: Mapping[Path, MountPlan | None], wanted: Mapping[Path, Wanted]) -> Changes:
    """What is to be done about the mounts that are `present`, to have the ones that are wanted. What is the same stays
    alone. None: this mount has ended."""
    running = {point: plan for point, plan in present.items() if plan is not None}
    return Changes(
        started=tuple(point for point in wanted if point not in running),
        replaced=tuple(point for point in wanted if point in running and running[point] != wanted[point].plan),
        ended=tuple(point for point in present if point not in wanted),
    )
