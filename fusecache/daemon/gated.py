"""Starts a mount behind the gate: looks at the kernel, chooses the open mode, and becomes the supervisor.

    plan -> features of the kernel -> open mode -> folders of workers and agent -> embedded server (folder SOURCE)
         -> exec(supervisor)

The process keeps its id: who started `fusecache mount` finds the supervisor under it. Everything that needs libraries
has happened before; the supervisor is standard library only. What it starts (`daemon.agent`, `daemon.worker`) gets the
plan as a memfd.

Mounts nothing itself.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import NoReturn

import structlog

from fusecache.config.settings import MountPlan
from fusecache.daemon.control_client import mount_lock, socket_path
from fusecache.daemon.embedded_child import EmbeddedChild, served_by
from fusecache.daemon.mount_process import python_path
from fusecache.daemon.mountpoint import may_allow_other, resolve
from fusecache.daemon.own_folders import agent_folder, hand_over
from fusecache.daemon.ready_pipe import ReadyPipe
from fusecache.fs.ownership import NOBODY
from fusecache.kernel.features import Decision, Features, decide_open_mode, parse_mask
from fusecache.kernel.privileges import Identity
from fusecache.kernel.probe import probe
from fusecache.kernel.spec import MountSpec
from fusecache.own_user import own_user

log = structlog.get_logger(__name__)

SLOTS = 64
"""Answers of one worker on their way at once, 1 MiB each at most; their pages are made when they are first used."""


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
    *,
    ready: ReadyPipe,
    announcement: str,
) -> NoReturn:
    """Replace this process by the supervisor of `plan`. Raises FusecacheError when the embedded server fails, or
    workers can't be `identity` (None = who this process is).

    `ready` is told, and `announcement` printed, once reads work.
    """
    settings = plan.settings
    control = socket_path(settings.runtime_dir, plan.mountpoint)
    if identity is not None:
        hand_over(plan, identity, control)
    ready_fd = ready.keep_over_exec()
    embedded = None
    if plan.folder is not None:
        embedded = EmbeddedChild(plan.folder, settings.state_dir / "embedded")
        plan = served_by(plan, embedded.start())
    if identity is not None:
        plan = _as_seen_by_who_mounts(plan)
    program = (sys.executable, "-m")
    library_free = (sys.executable, "-S", "-m")
    spec = MountSpec(
        mountpoint=str(plan.mountpoint),
        fsname=plan.source,
        allow_other=may_allow_other() if settings.allow_other is None else settings.allow_other,
        open_mode=decision.open_mode,
        masked_features=parse_mask(settings.kernel_features),
        features=features,
        workers=settings.workers,
        gate_argv=(*library_free, "fusecache.kernel.gate"),
        worker_argv=(*program, "fusecache.daemon.worker"),
        agent_argv=(
            *(*program, "fusecache.daemon.agent", "--open-mode", decision.open_mode),
            *("--why", decision.why, "--announcement", announcement),
        ),
        plan_fd=_plan_memfd(plan),
        # Only the first agent gets it, and announces: one that is started again has nobody who waits.
        ready_fd=ready_fd if ready_fd is not None else _nobody_waits(),
        agent_socket=str(_agent_socket(agent_folder(control, settings))),
        control_socket=str(control),
        run_as_user=None if identity is None else identity.uid,
        run_as_group=None if identity is None else identity.gid,
        embedded_pid=None if embedded is None else embedded.keep_over_exec(),
        mount_lock=str(mount_lock(settings.runtime_dir, plan.mountpoint)),
        read_ahead_bytes=settings.read_ahead_bytes,
        max_background=settings.max_background,
        congestion_threshold=settings.congestion_threshold,
        max_read_bytes=settings.max_read_bytes,
        spin_us=settings.spin_us or 0,
        slots=SLOTS,
        silent_s=settings.silent_s,
        gate_settings=_backing_devices(plan),
        log_level=settings.log_level,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [*library_free, "fusecache.kernel.supervisor", "--spec-fd", str(spec.to_memfd())]
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
    """Of this process alone: the agent of a second start, which is refused only when it would mount, must not take the
    first one's workers. Sockets of processes that are gone are removed."""
    for left in folder.glob("agent-*.sock"):
        if not Path("/proc", left.stem.partition("-")[2]).exists():
            left.unlink(missing_ok=True)
    return folder / f"agent-{os.getpid()}.sock"


def _plan_memfd(plan: MountPlan) -> int:
    """The plan for agent and workers: from this program to itself, never from outside."""
    descriptor = os.memfd_create("fusecache-plan", 0)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        pickle.dump(plan, file)
    return descriptor


def plan_from(descriptor: int) -> MountPlan:
    """The plan of `_plan_memfd`; its descriptor is shared with others, so its position is not used."""
    plan = pickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    assert isinstance(plan, MountPlan)
    return plan


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
