"""The folders of a mount on the node's disk, and whose they are.

    state_dir            of who mounts; entered by `run_as_user`
      metadata           the metadata store of mounts whose agent is who mounts
      metadata-UID       of mounts whose agent is another user
    runtime_dir          of who mounts; entered by everybody
      <mount point>      of who mounts; control socket, lock of the mount point
        private[-UID]    sockets between agent and workers

What workers and agent write is theirs, in a folder that has their number in its name: a changed `run_as_user` finds its
own folder again or makes one, nothing that exists changes hands, and an earlier version of fusecache finds its own.
Root's metadata are copied into a new one: by them the files are known that somebody has open while a mount is taken
over. Never the other way: root does not read what a user without rights wrote.

Everything else stays the mounter's, so that they can't replace it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

import fusecache
from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon.control_client import socket_path
from fusecache.errors import StateError, UsageError
from fusecache.kernel.privileges import Identity, check_can_give_up, give_up
from fusecache.private_folder import make_for, prepare_shared_folder

log = structlog.get_logger(__name__)

_CANT_BECOME: Final = 255
"""Exit code of a child that can't become the other user; smaller ones count what it can't reach."""

_LIBRARIES: Final = ("trio", "grpc", "lmdb")
"""Packages; each may lie in a place of its own."""


class _Needed(NamedTuple):
    """What workers and agent must be able to use."""

    what: str
    path: Path
    mode: int
    """As for access(2)."""


def identity_of(settings: Settings) -> Identity | None:
    """Who workers and agent are to be; None = who mounts. UsageError when that is impossible."""
    uid, gid = settings.run_as_user, settings.run_as_group
    if uid is None:
        if gid is not None:
            raise UsageError(f"run_as_group {gid} is for workers with a run_as_user; give that too")
        return None
    if settings.open_mode == "classic":
        raise UsageError(f"run_as_user {uid}: open_mode classic has one process, which mounts; give another open_mode")
    identity = Identity(uid, uid if gid is None else gid)
    check_can_give_up(identity)
    return identity


def metadata_folder(settings: Settings) -> Path:
    """Where the metadata store lies."""
    return settings.state_dir / _of_user("metadata", settings.run_as_user)


def agent_folder(control_socket: Path, settings: Settings) -> Path:
    """Where the agent's socket for workers lies."""
    return control_socket.with_name(_of_user("private", settings.run_as_user))


def prepare_folders(plan: MountPlan) -> None:
    """Make or check what everything else lies in. StateError: a symbolic link, somebody else's, writable by others."""
    settings = plan.settings
    prepare_shared_folder(settings.state_dir, entered_by_others=settings.run_as_user is not None)
    prepare_shared_folder(settings.runtime_dir)
    prepare_shared_folder(socket_path(settings.runtime_dir, plan.mountpoint).parent)


def hand_over(plan: MountPlan, identity: Identity, control_socket: Path) -> None:
    """Make the folders of workers and agent, and see that they can use them and their program.

    By root, after `prepare_folders`. StateError, UsageError.
    """
    folders = (metadata_folder(plan.settings), agent_folder(control_socket, plan.settings))
    for folder in folders:
        make_for(folder, *identity)
    needed = [_Needed("folder", folder, os.R_OK | os.W_OK | os.X_OK) for folder in folders]
    needed.append(_Needed("program", Path(sys.executable), os.X_OK))
    needed.append(_Needed("package", Path(fusecache.__file__).parent, os.R_OK | os.X_OK))
    libraries = [os.__file__, *(found.origin for name in _LIBRARIES if (found := importlib.util.find_spec(name)))]
    needed += [_Needed("library", Path(file), os.R_OK) for file in libraries if file is not None]
    if plan.cluster is not None:
        for file in (plan.cluster.tls_ca_file, plan.cluster.tls_cert_file, plan.cluster.tls_key_file):
            if file is not None:
                needed.append(_Needed("TLS file", file, os.R_OK))
    _check_reached(identity, needed)


def bring_metadata(settings: Settings, identity: Identity) -> None:
    """Copy root's metadata for `identity`, who has none yet. By root, after `hand_over`. Never fails: it says so."""
    from fusecache.cache.store_copy import copy_store  # LMDB, which most starts need not load here
    from fusecache.cache.tables import FILE_NAME

    source, target = metadata_folder(settings.model_copy(update={"run_as_user": None})), metadata_folder(settings)
    part = f".{FILE_NAME}.{os.getpid()}"
    folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.listdir(folder) or not source.is_dir() or source.lstat().st_uid != os.geteuid():
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o600, dir_fd=folder)
        try:
            if copy_store(source, descriptor, map_bytes=settings.metadata_map_bytes):
                os.fchown(descriptor, *identity)
                os.rename(part, FILE_NAME, src_dir_fd=folder, dst_dir_fd=folder)
                log.info("metadata copied", of=str(source), to=str(target))
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
    except (OSError, StateError) as failure:
        log.warning("metadata not copied: they are listed anew", of=str(source), to=str(target), error=str(failure))
    finally:
        os.close(folder)


def _of_user(name: str, uid: int | None) -> str:
    return name if uid is None else f"{name}-{uid}"


def _check_reached(identity: Identity, needed: Sequence[_Needed]) -> None:
    """Ask the kernel, as that user: folders above count too, and whatever else it goes by."""
    pid = os.fork()
    if pid == 0:
        code = _CANT_BECOME
        try:
            give_up(identity)
            refused = (number for number, (_, path, mode) in enumerate(needed, 1) if not os.access(path, mode))
            code = next(refused, 0)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return
    if not 0 < code <= len(needed):
        raise UsageError(f"run_as_user {identity.uid}: this process can't become that user and group {identity.gid}")
    what, path, _ = needed[code - 1]
    raise StateError(
        f"{what} {path} can't be used by uid {identity.uid} (run_as_user): let that user in (chmod, chown; the "
        "folders above count too), or give another place"
    )
