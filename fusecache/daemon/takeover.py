"""Takes a mount over from the process that serves it: asks, waits until it has yielded, and compares what is inherited.

    hello -> yielding (or refused, with a reason) -> given: the connection's descriptors and what is bound to it

Before anything of the new mount is started: what there can't be twice (the embedded server, the agent) has ended over
there when `ask` returns. From here to the supervisor (`kernel.supervisor.takeover`) this process needs only go on; when
it ends instead, the other one takes the mount back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import structlog

import fusecache
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.control_client import mount_lock, socket_path
from fusecache.errors import FusecacheError, MountError
from fusecache.kernel.channel import Message
from fusecache.kernel.features import Decision
from fusecache.kernel.supervisor.takeover.facts import BadFacts, Descriptors, Facts
from fusecache.kernel.supervisor.takeover.line import Line, LineLost
from fusecache.kernel.supervisor.takeover.messages import PROTOCOLS, common_protocol, text_of
from fusecache.kernel.supervisor.takeover.private_socket import connect
from fusecache.kernel.supervisor.takeover.states import YIELDING_S
from fusecache.private_folder import prepare_private_folder

log = structlog.get_logger(__name__)

TRIES: Final = 3
OLD_SIDE_END_S: Final = 2.0
"""A killed supervisor's mount is dead within this time (SEMANTICS.md S36)."""

HELLO_S: Final = 10.0
"""For the answer to hello: the supervisor does nothing that waits."""


class OldSideGone(FusecacheError):
    """The process that had the mount ended before it gave it: the mount is dead, or about to be."""

    exit_code = MountError.exit_code


class TakenOver:
    """A mount that was given."""

    def __init__(self, line: Line, facts: Facts, descriptors: Descriptors) -> None:
        self.facts = facts
        self._line = line
        self._descriptors = descriptors

    def decision(self) -> Decision:
        """The open mode, which is the connection's."""
        mode = self.facts.open_mode
        assert mode in ("no-open", "passthrough")
        return Decision(mode, f"as before: taken over from version {self.facts.version}")  # type: ignore[arg-type]

    def keep_over_exec(self) -> dict[str, Any]:
        """For the supervisor's specification; from now on the descriptors are inherited."""
        for descriptor in self._descriptors.all():
            os.set_inheritable(descriptor, True)
        return {
            "facts": self.facts.to_message(),
            "descriptors": list(self._descriptors.all()),
            "line": self._line.keep_over_exec(),
        }


def takeover_socket(runtime_dir: Path, place: Path) -> Path:
    """Where the process that serves the mount point `place` can be asked for it."""
    return socket_path(runtime_dir, place).parent / "takeover" / "takeover.sock"


def prepare_folder(runtime_dir: Path, place: Path) -> Path:
    """The path of the socket, with its folder made or checked. StateError."""
    path = takeover_socket(runtime_dir, place)
    prepare_private_folder(path.parent)
    return path


def look(plan: MountPlan) -> bool:
    """Whether a mount of ours is there and answers; otherwise the place is free then. MountError: it can't be used."""
    with mountpoint.claim(mount_lock(plan.settings.runtime_dir, plan.mountpoint)):
        return mountpoint.prepare(plan.mountpoint)


def take(plan: MountPlan) -> TakenOver | None:
    """The mount that is there; None when its process ended meanwhile, so that there is none any more. As `ask`."""
    for _ in range(TRIES):
        try:
            return ask(plan)
        except OldSideGone as gone:
            log.warning("the mount can't be taken over, and is replaced when it is dead", why=str(gone))
            time.sleep(OLD_SIDE_END_S)
            if not look(plan):
                return None
    raise mountpoint.occupied(plan.mountpoint)


def ask(plan: MountPlan) -> TakenOver:
    """Take the mount at the plan's mount point over. Blocks for seconds: the other side ends its agent meanwhile.

    MountError: it can't be taken over, or is not given; the text says why. OldSideGone: look at the mount point again.
    """
    path = takeover_socket(plan.settings.runtime_dir, plan.mountpoint)
    place = str(plan.mountpoint)
    advice = f"run `fusecache umount {place}` first"
    if not os.path.exists(path):
        raise MountError(
            f"mount point {place!r} has a fusecache mount already, which can't be taken over: it is of open_mode "
            f"classic, or was started with another --runtime-dir than {str(plan.settings.runtime_dir)!r}; {advice}"
        )
    line = connect(str(path))
    try:
        line.send({"kind": "hello", "protocols": PROTOCOLS, "version": fusecache.__version__, "source": plan.source})
        answer, _ = line.receive_within(HELLO_S)
        _check(answer, place, advice)
        log.info("the mount is taken over", mountpoint=place, from_version=str(answer.get("version"))[:40])
        given, descriptors = line.receive_within(YIELDING_S + HELLO_S)
        if given["kind"] != "given":
            raise MountError(f"mount point {place!r} was not handed over: {text_of(given)}; {advice}")
        checked = Descriptors.checked(descriptors)
        facts = Facts.from_message(given)
    except LineLost as lost:
        line.close()
        if lost.is_gone:
            raise OldSideGone(f"the process that serves {place!r} ended before it handed it over") from None
        raise MountError(f"the process that serves {place!r} does not hand it over: {lost}; {advice}") from None
    except BadFacts as wrong:
        line.close()
        raise MountError(f"what serves {place!r} can't be taken over: {wrong}; {advice}") from None
    except MountError:
        line.close()
        raise
    _tell_inherited(plan, facts)
    return TakenOver(line, facts, checked)


def _check(answer: Message, place: str, advice: str) -> None:
    if answer["kind"] == "refused":
        raise MountError(f"mount point {place!r} has a fusecache mount already: {text_of(answer)}; {advice}")
    if answer["kind"] != "yielding" or common_protocol(answer) is None:
        raise MountError(
            f"mount point {place!r} has a fusecache mount of version {str(answer.get('version'))[:40]}, which this "
            f"version ({fusecache.__version__}) does not understand; {advice}"
        )


def _tell_inherited(plan: MountPlan, facts: Facts) -> None:
    """What was asked for and is not to be had before the next fresh mount."""
    settings = plan.settings
    for name, wanted, has in (
        ("open_mode", None if settings.open_mode == "auto" else settings.open_mode, facts.open_mode),
        ("allow_other", settings.allow_other, facts.allow_other),
        ("max_read_bytes", settings.max_read_bytes, facts.max_read_bytes),
        ("max_background", settings.max_background, facts.init_plan["max_background"]),
    ):
        if wanted is not None and wanted != has:
            log.warning(
                "a setting is bound to the kernel's connection, and stays as it was: unmount to change it",
                setting=name,
                wanted=wanted,
                stays=has,
            )
