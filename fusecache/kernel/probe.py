"""Find out once what this kernel lets this process do, by doing it: `probe` is asked by mount, doctor and the tests.

A child makes a mount namespace of its own, mounts there, answers INIT as the supervisor would, and tries every ioctl
and notification; its end takes the mount away, and no other process ever sees it. Versions decide nothing: distribution
kernels carry newer features, and containers take some away. What `features.judge` makes of it is all the rest reads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fusecache.errors import MountError
from fusecache.kernel import device, init_message
from fusecache.kernel.features import FEATURE_NAMES, KNOWN_FEATURES, Features, Observation, judge

PROBE_S: Final = 10.0
"""The child needs 40 ms; a kernel that lets it wait this long is not asked again."""

INIT_S: Final = 5.0
UNKNOWN_INODE: Final = (1 << 62) + 1
"""No file system has it: a notification about it is understood (ENOENT) or not (EINVAL), and changes nothing."""

_CLONE_NEWNS: Final = 0x00020000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000


def probe(masked: Iterable[str] = ()) -> Features:
    """Features of this kernel for this process, under the mask (words as of `features.parse_mask`). Takes 50 ms.

    Never raises for what the kernel refuses: that is the answer, with its reason.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-S", "-m", "fusecache.kernel.probe"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env=environment,
    )
    with child:
        try:
            output, said = child.communicate(timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return judge(_nothing(f"the probe did not end within {PROBE_S:g} s"), masked)
    if child.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return judge(_nothing(f"the probe ended with {child.returncode}: {last}"), masked)
    return judge({name: Observation(*seen) for name, seen in json.loads(output).items()}, masked)


def _nothing(why: str) -> dict[str, Observation]:
    return {name: Observation(False, why) for name in FEATURE_NAMES}


def _observe() -> dict[str, Observation]:
    """In the child: everything, on a mount that nobody sees."""
    seen = {}
    try:
        session = _private_mount()
    except MountError as failure:
        return _nothing(str(failure))
    seen["mount"] = Observation(True, "mount(2) was allowed")
    offered = init_message.parse_request(init := device.read_init(session, INIT_S))
    protocol = f"the kernel's INIT ({offered.major}.{offered.minor})"
    for known in KNOWN_FEATURES:
        if known.flag:
            has = bool(offered.flags & known.flag)
            since = ".".join(map(str, known.since))
            seen[known.name] = Observation(
                has, f"{protocol} {'offers it' if has else f'does not offer it; Linux has it since {since}'}"
            )
    plan = init_message.plan_for(
        init,
        passthrough=seen["passthrough"].present,
        max_read_bytes=1 << 20,
        read_ahead_bytes=1 << 20,
        max_background=12,
        congestion_threshold=9,
    )
    os.write(session, init_message.patched_answer(_answer(offered), plan))
    seen["clone"] = _clone(session)
    seen["store"] = _store(session)
    if seen["passthrough"].present:
        seen["passthrough"] = _passthrough(session)
    if seen["resend"].present:
        seen["resend"] = _resend(session)
    return seen


def _private_mount() -> int:
    """A session descriptor, mounted over / in a mount namespace of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        reason = os.strerror(ctypes.get_errno())
        raise MountError(f"mount(2) needs CAP_SYS_ADMIN, which this process lacks ({reason})")
    if libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None):
        raise MountError(f"mounts can't be made private: {os.strerror(ctypes.get_errno())}")
    session = device.open_device()
    device.mount(session, "/", "probe", allow_other=False, max_read_bytes=1 << 20)
    return session


def _answer(request: init_message.InitRequest) -> bytes:
    """A worker's answer, as far as the kernel reads it."""
    low = request.flags & (init_message.INIT_EXT | init_message.MAX_PAGES | init_message.ASYNC_READ)
    body = init_message.INIT_OUT.pack(7, request.minor, 1 << 20, low, 12, 9, 1 << 20, 1, 256, 0, 0, 0, 0)
    body = body.ljust(init_message.INIT_OUT_BYTES, b"\0")
    return init_message.OUT_HEADER.pack(init_message.OUT_HEADER.size + len(body), 0, request.unique) + body


def _clone(session: int) -> Observation:
    try:
        os.close(device.clone(session))
    except OSError as failure:
        return Observation(False, f"the ioctl FUSE_DEV_IOC_CLONE failed: {failure.strerror}")
    return Observation(True, "the ioctl FUSE_DEV_IOC_CLONE works")


def _store(session: int) -> Observation:
    """struct fuse_notify_store_out: nodeid, offset, size, padding."""
    body = UNKNOWN_INODE.to_bytes(8, "little") + bytes(8) + (1).to_bytes(4, "little") + bytes(4) + b"x"
    header = device.OUT_HEADER.pack(device.OUT_HEADER.size + len(body), device.NOTIFY_STORE, 0)
    try:
        os.write(session, header + body)
    except OSError as failure:
        if failure.errno != errno.ENOENT:
            return Observation(False, f"FUSE_NOTIFY_STORE failed: {failure.strerror}")
    return Observation(True, "FUSE_NOTIFY_STORE was understood")


def _passthrough(session: int) -> Observation:
    """Register a file of no stacked file system, read-only as the gate does."""
    backing = os.memfd_create("backing")
    read_only = os.open(f"/proc/self/fd/{backing}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Mutable: with bytes, fcntl gives the buffer back instead of the ioctl's result.
        number = fcntl.ioctl(session, device.BACKING_OPEN, bytearray(device.BACKING_MAP.pack(read_only, 0, 0)))
    except OSError as failure:
        return Observation(False, f"the ioctl FUSE_DEV_IOC_BACKING_OPEN failed: {failure.strerror}")
    fcntl.ioctl(session, device.BACKING_CLOSE, number.to_bytes(4, "little"))
    return Observation(True, "the ioctl FUSE_DEV_IOC_BACKING_OPEN works")


def _resend(session: int) -> Observation:
    try:
        device.resend(session)
    except OSError as failure:
        return Observation(False, f"FUSE_NOTIFY_RESEND failed: {failure.strerror}")
    return Observation(True, "FUSE_NOTIFY_RESEND was understood")


def main() -> int:
    """Print what was seen as JSON."""
    json.dump(_observe(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
