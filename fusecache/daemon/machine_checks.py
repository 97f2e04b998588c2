"""`doctor`, first half: is this machine fit to mount? Reads only; nothing is created, mounted or changed.

Each check is a function that returns one `Check`: what was found, a verdict, and what to change. `fail` = a mount can't
work, `warn` = it works but slower or for fewer users. The cluster's half is `daemon.cluster_checks`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fusecache.clock import boot_id
from fusecache.config.settings import Settings
from fusecache.config.units import approximate_size
from fusecache.daemon.mount_child import OTHER_DESCRIPTORS
from fusecache.daemon.mountpoint import check_device, containing_mount
from fusecache.daemon.own_folders import identity_of
from fusecache.errors import FusecacheError
from fusecache.kernel.features import KNOWN_FEATURES, Features, decide_open_mode, parse_mask
from fusecache.kernel.probe import probe

Verdict = Literal["ok", "warn", "fail"]

COMMAND_S = 5.0
OLDEST_KERNEL = (4, 18)
"""Unprivileged FUSE mounts in containers; older kernels are not tried by anybody here."""

LARGE_REQUESTS_KERNEL = (4, 20)
"""FUSE 7.28: requests of 1 MiB instead of 128 KiB."""

LOW_SPACE = 1 << 30
"""Free bytes under which the state folder is short: a million files take about 300 MB."""

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "fuse")
BUILD_YEAR = 2025
"""A clock before this is wrong."""


RUN_AS_ADVICE = "give --run-as-user a uid that nobody else uses and that may read the block files"


class Check(NamedTuple):
    """One row of the report."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to change; "" when nothing is wrong."""


def machine_checks(settings: Settings) -> Iterator[Check]:
    """All of them, cheapest first."""
    yield check_fuse_device()
    yield check_fusermount()
    yield check_kernel(os.uname().release)
    yield from check_kernel_features(settings)
    yield check_allow_other(Path("/etc/fuse.conf"))
    yield check_run_as(settings)
    yield check_folder_for("state folder", settings.state_dir, "--state-dir")
    yield check_folder_for("control folder", settings.runtime_dir, "--runtime-dir")
    yield check_open_files(settings)
    yield check_read_ahead()
    yield check_clock()


def check_fuse_device() -> Check:
    """/dev/fuse is the device and can be opened."""
    try:
        check_device()
    except FusecacheError as failure:
        found, _, advice = str(failure).partition("; ")
        return Check("/dev/fuse", "fail", found, advice)
    return Check("/dev/fuse", "ok", "can be opened")


def check_fusermount() -> Check:
    """fusermount3 is there and setuid root, which every user but root needs."""
    program = shutil.which("fusermount3")
    root = os.geteuid() == 0
    if program is None:
        if root:
            return Check("fusermount3", "ok", "not installed; root mounts without it")
        return Check("fusermount3", "fail", "not in PATH", "install the package fuse3")
    done = subprocess.run([program, "--version"], capture_output=True, timeout=COMMAND_S, check=False)
    version = done.stdout.decode(errors="replace").strip() or "version unknown"
    status = os.stat(program)
    if not root and not (status.st_mode & stat.S_ISUID and status.st_uid == 0):
        return Check("fusermount3", "fail", f"{program} is not setuid root", f"chmod u+s {program}, as root")
    return Check("fusermount3", "ok", f"{program}, {version}")


def check_kernel(release: str) -> Check:
    """What this kernel's FUSE can do for us."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return Check("kernel", "warn", f"{release}: not a Linux version", "")
    version = (int(match[1]), int(match[2]))
    if version < OLDEST_KERNEL:
        return Check("kernel", "fail", release, "use Linux 4.18 or later")
    if version < LARGE_REQUESTS_KERNEL:
        return Check("kernel", "warn", f"{release}: reads come in pieces of 128 KiB", "use Linux 4.20 or later")
    return Check("kernel", "ok", f"{release}: readdirplus, parallel look-ups, requests of 1 MiB")


def check_kernel_features(settings: Settings) -> Iterator[Check]:
    """What a mount behind the gate may use, why not where a feature is missing or masked, and the mode that follows."""
    try:
        features = probe(parse_mask(settings.kernel_features))
    except FusecacheError as failure:
        yield Check("kernel features", "fail", str(failure), "correct kernel_features")
        return
    usable = [row.name for row in features.rows if row.usable]
    if not usable and len(reasons := {row.why for row in features.rows}) == 1:
        found = f"none can be used: {reasons.pop()}"
        yield Check("kernel features", "warn", found, "mount as root; open_mode classic works without")
        yield from _check_open_mode(features, settings)
        return
    yield Check("kernel features", "ok" if usable else "warn", ", ".join(usable) or "none can be used")
    purposes = {known.name: known.purpose for known in KNOWN_FEATURES}
    for row in features.rows:
        if not row.usable:
            yield Check(f"kernel feature {row.name}", "warn", row.why, f"without it, no {purposes[row.name]}")
    yield from _check_open_mode(features, settings)


def _check_open_mode(features: Features, settings: Settings) -> Iterator[Check]:
    try:
        decision = decide_open_mode(features, settings.open_mode)
    except FusecacheError as failure:
        yield Check("open mode", "fail", str(failure), "leave open_mode at auto")
        return
    yield Check("open mode", "ok", f"{decision.open_mode}: {decision.why}")


def check_allow_other(fuse_conf: Path) -> Check:
    """Whether users other than the one who mounts can be let in."""
    if os.geteuid() == 0:
        return Check("other users", "ok", "root may let them in")
    try:
        lines = [line.strip() for line in fuse_conf.read_text().splitlines()]
    except OSError as failure:
        return Check("other users", "warn", f"{fuse_conf}: {failure.strerror}", f"add user_allow_other to {fuse_conf}")
    if "user_allow_other" in lines:
        return Check("other users", "ok", f"user_allow_other is in {fuse_conf}")
    return Check(
        "other users",
        "warn",
        f"user_allow_other is not in {fuse_conf}: a mount is private to its owner",
        f"add the line user_allow_other to {fuse_conf}, or mount as root",
    )


def check_run_as(settings: Settings) -> Check:
    """Whether what reads the network's bytes can do no more than it must."""
    try:
        identity = identity_of(settings)
    except FusecacheError as failure:
        found, _, advice = str(failure).partition("; ")
        return Check("rights", "fail", found, advice)
    if identity is not None:
        return Check("rights", "ok", f"workers and agent are uid {identity.uid}, gid {identity.gid}, no capability")
    if os.geteuid() == 0 and settings.open_mode != "classic":
        return Check("rights", "warn", "workers and agent are root, as who mounts", RUN_AS_ADVICE)
    return Check("rights", "ok", f"all processes are uid {os.geteuid()}, as who mounts")


def check_parts(parts: Iterable[dict[str, Any]]) -> Iterator[Check]:
    """The same, of a mount that runs, as its supervisor sees its parts; nothing where there is none."""
    exposed = [part for part in parts if part["name"].startswith(("worker", "agent")) and part.get("rights")]
    if not exposed:
        return
    users = ", ".join(sorted({str(part["rights"]["uid"]) for part in exposed}))
    if any(part["rights"]["capabilities"] for part in exposed):
        yield Check("rights of the parts", "warn", f"workers and agent (uid {users}) have capabilities", RUN_AS_ADVICE)
    else:
        yield Check("rights of the parts", "ok", f"workers and agent (uid {users}) have no capability")


def check_folder_for(name: str, folder: Path, flag: str) -> Check:
    """Can the daemon write there, on a local file system, with room?"""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return Check(name, "fail", f"{existing} is not a folder", f"give another {flag}")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            name, "fail", f"{folder} can't be written by uid {os.geteuid()}", f"give another {flag}, or chown it"
        )
    if existing == folder and folder.stat().st_uid not in (os.geteuid(), 0):
        return Check(
            name, "fail", f"{folder} belongs to uid {folder.stat().st_uid}", f"give another {flag}, or chown it"
        )
    mounted = containing_mount(existing)
    kind = mounted[0].fs_type if mounted else "unknown"
    if kind.partition(".")[0] in NETWORK_FILE_SYSTEMS:
        return Check(name, "fail", f"{folder} lies on {kind}, a network file system", f"give a local {flag}")
    free = shutil.disk_usage(existing).free
    if free < LOW_SPACE and name == "state folder":
        return Check(
            name, "warn", f"{folder}: {approximate_size(free)} free", f"free some space, or give another {flag}"
        )
    return Check(name, "ok", f"{folder} on {kind}, {approximate_size(free)} free")


def check_open_files(settings: Settings) -> Check:
    """The hard limit on descriptors; the soft one is raised by the daemon itself."""
    needed = settings.max_open_blocks + OTHER_DESCRIPTORS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Check(
            "open files",
            "warn",
            f"limit {hard}, wanted {needed}",
            f"raise it (ulimit -n, LimitNOFILE=), or give --max-open-blocks {max(16, hard - OTHER_DESCRIPTORS)}",
        )
    return Check(
        "open files", "ok", f"limit {'unlimited' if hard == resource.RLIM_INFINITY else hard}, wanted {needed}"
    )


def check_read_ahead() -> Check:
    """May this process set the kernel's read-ahead of the mount? It is a file of /sys that only root may write."""
    advice = "mount as root, or let root write /sys/class/bdi/<device>/read_ahead_kb after mounting"
    slow = "cold sequential reads run at the kernel's 128 KiB read-ahead"
    if os.geteuid() != 0:
        return Check("read-ahead", "warn", f"only root may set it: {slow}", advice)
    mounted = containing_mount(Path("/sys/class/bdi"))
    if mounted is None or "ro" in mounted[0].options.split(","):
        return Check("read-ahead", "warn", f"/sys is read-only here: {slow}", "mount /sys writable in the container")
    return Check("read-ahead", "ok", "can be set")


def check_clock() -> Check:
    """Ages are kept as seconds since boot with the boot's id; certificates need the right date."""
    try:
        boot_id()
    except OSError as failure:
        return Check("clock", "fail", f"the boot id can't be read: {failure.strerror}", "mount /proc in the container")
    year = time.gmtime().tm_year
    if year < BUILD_YEAR:
        return Check("clock", "warn", f"the year is {year}: certificates will look invalid", "set the clock (NTP)")
    return Check("clock", "ok", f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}")
