"""`doctor`, second half: does the cluster answer, as whom, and how well can this node read from it? Reads only.

Checks build on each other: when nobody answers, the rest is not tried.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from fusecache.alluxio.model import Block, BlockWorkerInfo, FileStatus, block_id_of
from fusecache.alluxio.node_names import own_hosts
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.config.source import parse_host_port
from fusecache.config.units import approximate_size, format_size
from fusecache.daemon.cluster_access import ClusterAccess, open_cluster
from fusecache.daemon.machine_checks import Check, Verdict
from fusecache.errors import (
    AuthenticationFailed,
    FusecacheError,
    NotFound,
    PermissionDenied,
    UpstreamError,
    VersionMismatch,
)

CONNECT_S = 5.0
"""Seconds for one TCP connection to a master."""

SURVEY_S = 10.0
"""Seconds spent on listing files to learn their sizes."""

SURVEY_FILES = 100_000
SURVEY_FOLDERS = 50
TESTED_VERSION = "2.9"
MULTI_BLOCK_ADVICE = (
    "such files can't be handed to the kernel as one block file; write data sets with one block a file "
    "(alluxio.user.block.size.bytes.default above the largest file)"
)
PRIMARY_ADVICE = "check that a master is primary and has left safe mode"
_NEVER_MS = -1


def cluster_checks(
    cluster: ClusterConfig | None, folder: Path | None, path: bytes, settings: Settings
) -> Iterator[Check]:
    """All checks of a source, in order, as far as they get."""
    if folder is not None:
        yield check_source_folder(folder, settings)
    if cluster is not None:
        reachable = [_master_error(master) for master in cluster.masters]
        for master, error in zip(cluster.masters, reachable, strict=True):
            # A standby that is down is no failure as long as somebody answers.
            verdict: Verdict = "ok" if error is None else "warn" if None in reachable else "fail"
            advice = "" if error is None else "check name, port, firewall, and that the master runs"
            yield Check(f"master {master}", verdict, error or "accepts connections", advice)
        if None not in reachable:
            return
    with ExitStack() as stack:
        try:
            access = stack.enter_context(open_cluster(cluster, folder, settings))
        except FusecacheError as failure:
            yield _connection_check(failure, cluster)
            return
        yield _version_check(access)
        root, check = _path_check(access, path)
        yield check
        workers: tuple[BlockWorkerInfo, ...] = ()
        try:
            workers = access.client.block_workers(access.budget())
        except UpstreamError as failure:
            yield Check(
                "block workers", "fail", str(failure), "check that the master is primary and has left safe mode"
            )
        here = [worker for worker in workers if is_here(worker, access.cluster)]
        if workers:
            yield _workers_check(workers, here)
        if root is not None and root.folder:
            files = _survey(access, path)
            yield block_size_check(files)
            if settings.zero_rpc_reads and here:
                yield _local_read_check(access, here, files)


def check_source_folder(folder: Path, settings: Settings) -> Check:
    """Blocks of the embedded server are hard links where state and source share a file system, else copies."""
    state = settings.state_dir
    while not state.exists():
        state = state.parent
    if folder.stat().st_dev == state.stat().st_dev:
        return Check("folder", "ok", f"{folder} shares a file system with the state folder: blocks are hard links")
    return Check(
        "folder",
        "warn",
        f"{folder} is on another file system than the state folder: what is read is copied there",
        f"give a --state-dir on the file system of {folder}",
    )


def is_here(worker: BlockWorkerInfo, cluster: ClusterConfig) -> bool:
    """True for this node's block worker."""
    names = {worker.address.host, worker.address.container_host, worker.address.node} - {""}
    if cluster.node_hosts:
        return bool(names & set(cluster.node_hosts))
    return bool(own_hosts(names))


def block_size_check(files: list[FileStatus]) -> Check:
    """Files of several blocks: Alluxio's default block of 64 MiB makes every large file one."""
    if not files:
        return Check("block size", "ok", "no files to look at")
    several = [file for file in files if file.block_count > 1]
    largest = max(files, key=lambda file: file.length)
    found = f"{len(files)} files looked at, the largest {approximate_size(largest.length)}"
    if not several:
        return Check("block size", "ok", f"{found}, one block each")
    sizes = ", ".join(format_size(size) for size in sorted({file.block_size for file in several})[:3])
    return Check("block size", "warn", f"{found}; {len(several)} have several blocks (of {sizes})", MULTI_BLOCK_ADVICE)


def _master_error(master: str) -> str | None:
    try:
        socket.create_connection(parse_host_port(master), CONNECT_S).close()
    except OSError as failure:
        return failure.strerror or str(failure)
    return None


def _connection_check(failure: FusecacheError, cluster: ClusterConfig | None) -> Check:
    match failure:
        case AuthenticationFailed():
            advice = (
                "give --user, --impersonate or --auth as the cluster has them (alluxio.security.authentication.type)"
            )
            return Check("authentication", "fail", str(failure), advice)
        case VersionMismatch():
            return Check("version", "fail", str(failure), f"use a cluster of Alluxio {TESTED_VERSION}")
        case _ if cluster is None:
            return Check("embedded server", "fail", str(failure), "see its message above")
        case _:
            return Check("cluster", "fail", str(failure), PRIMARY_ADVICE)


def _version_check(access: ClusterAccess) -> Check:
    identity = access.identity
    found = f"Alluxio {identity.version}, cluster {identity.cluster_id}, primary {identity.primary}"
    if identity.version.startswith(TESTED_VERSION):
        return Check("cluster", "ok", found)
    return Check("cluster", "warn", found, f"only {TESTED_VERSION} is tested")


def _path_check(access: ClusterAccess, path: bytes) -> tuple[FileStatus | None, Check]:
    shown = path.decode("utf-8", "backslashreplace")
    try:
        status = access.client.get_status(path, sync_interval_ms=_NEVER_MS, budget=access.budget())
    except NotFound:
        return None, Check("path", "fail", f"{shown} is not in the cluster", "check it with `fusecache ls`")
    except PermissionDenied as failure:
        return None, Check("path", "fail", str(failure), "give --user or --impersonate of somebody who may read it")
    except UpstreamError as failure:
        return None, Check("path", "fail", str(failure), "")
    if not status.folder:
        return status, Check("path", "fail", f"{shown} is a file", "mount the folder it is in")
    return status, Check("path", "ok", f"{shown} is a folder")


def _workers_check(workers: tuple[BlockWorkerInfo, ...], here: list[BlockWorkerInfo]) -> Check:
    capacity = sum(worker.capacity_bytes for worker in workers)
    used = sum(worker.used_bytes for worker in workers)
    found = f"{len(workers)}, {approximate_size(used)} of {approximate_size(capacity)} in use"
    if here:
        return Check("block workers", "ok", f"{found}; {here[0].address.target} is this node's")
    hosts = ", ".join(sorted({worker.address.host for worker in workers})[:5])
    return Check(
        "block workers",
        "warn",
        f"{found}; none on this node ({socket.gethostname()}): every read crosses the network",
        f"run a block worker here, or tell by --node-host which of {hosts} it is",
    )


def _survey(access: ClusterAccess, path: bytes) -> list[FileStatus]:
    """Files at and below `path`, breadth first, as many as the limits allow; what can't be listed is left out."""
    files: list[FileStatus] = []
    folders = [path]
    deadline = time.monotonic() + SURVEY_S
    for listed in range(SURVEY_FOLDERS):
        if listed >= len(folders):
            break
        try:
            for batch in access.client.list_status(folders[listed], sync_interval_ms=_NEVER_MS, budget=access.budget()):
                files += [entry for entry in batch if not entry.folder]
                folders += [entry.path for entry in batch if entry.folder]
                if len(files) > SURVEY_FILES or time.monotonic() > deadline:
                    return files
        except (NotFound, PermissionDenied):
            continue  # another client removed it, or it is not for us: the sample is smaller
        except UpstreamError:
            break  # the master is in trouble, which the checks before this one tell better
    return files


def _local_read_check(access: ClusterAccess, here: list[BlockWorkerInfo], files: list[FileStatus]) -> Check:
    """Open a block of this node's block worker as a read would."""
    ids = {worker.worker_id for worker in here}
    block = next(filter(None, (_held_block(file, ids) for file in files)), None)
    name = "zero-RPC reads"
    if block is None:
        return Check(name, "ok", "this node's block worker holds nothing of this path yet, nothing to try")
    if _opens(access.client.open_local(block)):
        return Check(name, "ok", "a block of this node's block worker was opened without asking it")
    try:
        learned = _opens(access.client.learn_local(block, access.budget()))
    except UpstreamError as failure:
        return Check(name, "warn", f"the block worker did not tell its folder: {failure}", "see --tier-folder")
    if learned:
        return Check(name, "ok", "the block worker told its folder, which is visible here")
    return Check(
        name,
        "warn",
        "the block worker's tier folder is not visible here: its blocks are read over the network",
        "mount the tier folder (alluxio.worker.tieredstore.level0.dirs.path) into this container at the same path, "
        "or say where it is with --tier-folder",
    )


def _held_block(file: FileStatus, worker_ids: set[int]) -> Block | None:
    """The first block of `file` that one of `worker_ids` holds."""
    for index, holders in enumerate(file.locations):
        if worker_ids & set(holders):
            return Block(
                block_id=block_id_of(file.file_id, index),
                length=min(file.block_size, file.length - index * file.block_size),
                locations=holders,
                ufs_path=None,
                ufs_offset=0,
                mount_id=file.mount_id,
                in_ufs_tier=False,
            )
    return None


def _opens(descriptor: int | None) -> bool:
    if descriptor is None:
        return False
    os.close(descriptor)
    return True
