"""Starts a mount behind the gate: looks at the kernel, chooses the open mode, and becomes the supervisor.

    plan -> features of the kernel -> open mode -> folders of workers and agent -> embedded server (folder SOURCE)
         -> exec(supervisor)

Where a mount was taken over (`daemon.takeover`), what is bound to its connection is kept. The supervisor also gets the
command that mounted, for SIGHUP (`kernel.supervisor.takeover.reloading`).

The process keeps its id: who started `fusecache mount` finds the supervisor under it. Everything that needs libraries
has happened before; the supervisor is standard library only. What it starts (`daemon.agent`, `daemon.worker`) gets the
plan as a memfd.

Mounts nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import structlog

from fusecache.config.mount_command import MountCommand
from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon import process_ids, takeover
from fusecache.daemon.control_client import mount_lock, socket_path
from fusecache.daemon.embedded_child import EmbeddedChild, restart_argv, served_by
from fusecache.daemon.mount_process import python_path
from fusecache.daemon.mountpoint import may_allow_other, resolve
from fusecache.daemon.own_folders import agent_folder, bring_metadata, hand_over
from fusecache.errors import MountError
from fusecache.fs.ownership import NOBODY
from fusecache.kernel.control_listener import short_address
from fusecache.kernel.features import Decision, Features, decide_open_mode, parse_mask
from fusecache.kernel.privileges import Identity
from fusecache.kernel.probe import probe
from fusecache.kernel.ready_pipe import ReadyPipe
from fusecache.kernel.spec import MountSpec
from fusecache.own_user import own_user

log = structlog.get_logger(__name__)

Passed = TypeVar("Passed", MountPlan, MountCommand)

SLOTS = 64
"""Answers of one worker on their way at once, 1 MiB each at most; their pages are made when they are first used."""

LATE_S = 10.0
"""Past a request's budget, in which its worker answers whatever happens: then the gate answers."""


class Start(NamedTuple):
    """How this process was started."""

    announcement: str = ""
    """Printed once reads work."""

    command: MountCommand | None = None
    """What SIGHUP reads again; None: nothing, or the parent does."""

    parent_reloads: bool = False
    """The parent starts this mount's next process."""

    is_reload: bool = False
    """To take over a mount that is there, and for nothing else."""


def choose(plan: MountPlan) -> tuple[Features, Decision]:
    """What this machine can do, and the mode that follows. UsageError, MountError: what was asked for is impossible."""
    settings = plan.settings
    features = probe(parse_mask(settings.kernel_features))
    decision = decide_open_mode(features, settings.open_mode)
    log.debug("open_mode", open_mode=decision.open_mode, why=decision.why)
    return features, decision


def become_supervisor(
    plan: MountPlan,
    features: Features,
    decision: Decision,
    identity: Identity | None,
    start: Start,
    *,
    ready: ReadyPipe,
    takes_over: bool,
) -> NoReturn:
    """Replace this process by the supervisor of `plan`. Raises FusecacheError when the embedded server fails, or
    workers can't be `identity` (None = who this process is).

    `ready` is told once reads work. `takes_over`: a mount of ours is there already.
    """
    settings = plan.settings
    control = socket_path(settings.runtime_dir, plan.mountpoint)
    if identity is not None:
        hand_over(plan, identity, control)
    ready_fd = ready.keep_over_exec()
    process_ids.spread()
    takeover_path = takeover.prepare_folder(settings.runtime_dir, plan.mountpoint)
    # Nothing that can be known to fail comes after this: while this process gets ready, the other has no agent.
    taken = takeover.take(plan) if takes_over else None
    if taken is None and start.is_reload:
        raise MountError(f"{str(plan.mountpoint)!r} is not mounted any more")
    if taken is not None:
        decision = taken.decision()
    if identity is not None:
        bring_metadata(settings, identity)
    embedded = None
    embedded_argv: tuple[str, ...] = ()
    if plan.folder is not None:
        embedded = EmbeddedChild(plan.folder, settings.state_dir / "embedded")
        address = embedded.start()
        embedded_argv = restart_argv(plan.folder, settings.state_dir, address)
        plan = served_by(plan, address)
    if identity is not None:
        plan = _as_seen_by_who_mounts(plan)
    program = (sys.executable, "-m")
    library_free = (sys.executable, "-S", "-m")
    if taken is not None:
        allow_other, max_read_bytes = taken.facts.allow_other, taken.facts.max_read_bytes
    else:
        allow_other = may_allow_other() if settings.allow_other is None else settings.allow_other
        max_read_bytes = settings.max_read_bytes
    spec = MountSpec(
        mountpoint=str(plan.mountpoint),
        fsname=plan.source,
        allow_other=allow_other,
        open_mode=decision.open_mode,
        masked_features=parse_mask(settings.kernel_features),
        features=features,
        workers=settings.workers,
        gate_argv=(*library_free, "fusecache.kernel.gate.main"),
        worker_argv=(*program, "fusecache.daemon.worker"),
        agent_argv=(
            *(*program, "fusecache.daemon.agent", "--open-mode", decision.open_mode),
            *("--why", decision.why, "--announcement", start.announcement),
        ),
        plan_fd=_memfd("fusecache-plan", plan),
        # Only the first agent gets it, and announces: one that is started again has nobody who waits.
        ready_fd=ready_fd if ready_fd is not None else _nobody_waits(),
        agent_socket=str(_agent_socket(agent_folder(control, settings))),
        control_socket=str(control),
        run_as_user=None if identity is None else identity.uid,
        run_as_group=None if identity is None else identity.gid,
        embedded_pid=None if embedded is None else embedded.keep_over_exec(),
        embedded_argv=embedded_argv,
        takeover_socket=str(takeover_path),
        takeover={} if taken is None else taken.keep_over_exec(),
        successor_argv=() if start.command is None else (*program, "fusecache.daemon.mount_child"),
        command_fd=None if start.command is None else _memfd("fusecache-command", start.command),
        parent_reloads=start.parent_reloads,
        mount_lock=str(mount_lock(settings.runtime_dir, plan.mountpoint)),
        read_ahead_bytes=settings.read_ahead_bytes,
        max_background=settings.max_background,
        congestion_threshold=settings.congestion_threshold,
        max_read_bytes=max_read_bytes,
        spin_us=settings.spin_us or 0,
        slots=SLOTS,
        silent_s=settings.silent_s,
        gate_settings={**_backing_devices(plan), "answer_limits": _answer_limits(settings)},
        log_level=settings.log_level,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [*library_free, "fusecache.kernel.supervisor.main", "--spec-fd", str(spec.to_memfd())]
    command += ["--", plan.source, str(plan.mountpoint)]
    os.execve(sys.executable, command, environment)


def _as_seen_by_who_mounts(plan: MountPlan) -> MountPlan:
    """`plan` with everything said that workers and agent, another user, would find out differently."""
    assert plan.cluster is not None
    cluster, settings = plan.cluster, plan.settings
    return plan.model_copy(
        update={
            # Links on the way may lie in folders that the other user can't enter.
            "mountpoint": Path(os.fsdecode(resolve(plan.mountpoint))),
            "cluster": cluster.model_copy(update={"user": cluster.user or own_user()}),
            "settings": settings.model_copy(
                update={
                    "uid": NOBODY if settings.uid is None else settings.uid,
                    "gid": NOBODY if settings.gid is None else settings.gid,
                }
            ),
        }
    )


def _nobody_waits() -> int:
    """A descriptor to announce to when nobody listens. It must outlive the exec: the supervisor would otherwise close
    whatever had got its number by then (it was the table of open inodes, which the next gate then lacked)."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.set_inheritable(descriptor, True)
    return descriptor


def _agent_socket(folder: Path) -> Path:
    """Of this process alone: the agent of a second start must not take the first one's workers. By chance, because two
    pods that share the folder have equal process ids. Sockets that nobody listens at are removed."""
    for left in folder.glob("agent-*.sock"):
        if not _is_listening(left):
            with contextlib.suppress(OSError):  # gone already, or no socket: the folder is another user's to fill
                left.unlink()
    return folder / f"agent-{secrets.token_hex(4)}.sock"


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, short_address(path) as address:
        connection.setblocking(False)
        try:
            connection.connect(address)
        except BlockingIOError:  # it has more to do than to let somebody in
            return True
        except OSError:
            return False
    return True


def _memfd(name: str, content: MountPlan | MountCommand) -> int:
    """The plan for agent and workers, the command for the next process: from this program to itself, never from
    outside."""
    descriptor = os.memfd_create(name, 0)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        pickle.dump(content, file)
    return descriptor


def from_memfd(descriptor: int, kind: type[Passed]) -> Passed:
    """What the supervisor passed on. Others have the descriptor too, so its position is not used."""
    content = pickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    assert isinstance(content, kind)
    return content


def _answer_limits(settings: Settings) -> dict[str, float]:
    """How long the gate waits for workers (`kernel.gate.dispatch.Limits`): for longer than they ever take."""
    return {"read_s": settings.read_budget_s + LATE_S, "other_s": settings.metadata_budget_s + LATE_S}


def _backing_devices(plan: MountPlan) -> dict[str, list[int]]:
    """Device numbers of the tier folders: the gate takes backing files from nowhere else. Unknown while the folders
    are: a block worker's answer tells them later."""
    assert plan.cluster is not None
    devices = set()
    for folder in plan.cluster.tier_folders:
        try:
            devices.add(os.stat(folder).st_dev)
        except OSError as error:
            log.info("tier folder can't be looked at", folder=folder, error=error.strerror)
    return {"backing_devices": sorted(devices)} if devices else {}
