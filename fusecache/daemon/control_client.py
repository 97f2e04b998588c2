"""Ask a running mount: where its control socket lies and one blocking call to it. Standard library only.

    find_socket -> connect -> one line -> one line      `call`
    nobody there, or gone in the middle, while the mount lives: once more      `ask`

A mount that is taken over goes from one process to another with its socket: what the first one had not answered by its
end is lost, and its name is the second one's a moment later.

The protocol is one JSON object a line each way: `{"kind": "status", ...}` is answered with `{"ok": true, ...}` or
`{"ok": false, "type": "NotFound", "error": "..."}`, where type is a class of `fusecache.errors`, raised here again.
Paths travel as text relative to the mount, with bytes that are no UTF-8 as surrogates (`os.fsdecode`).

What the kinds do is not known here; `daemon.control` serves them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pwd
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusecache import errors
from fusecache.daemon.mountpoint import MountInfo, find_mount, probe, read_inside, resolve
from fusecache.errors import InterruptedWait, MountError, ProtocolError
from fusecache.kernel.control_listener import short_address

MAX_REPLY = 16 << 20
"""Bytes of one reply; the largest is the text of all metrics."""

READ_S = 5.0
"""Seconds a mount may take to give its `.fusecache/config`, or a sign of life."""

AGAIN_S = 0.1
MOST_TRIES = 20
"""Of a question that nobody answers. A mount has no owner for milliseconds; a take-over can cost a question two tries,
seconds apart: what the old agent had taken, and what waited for the next one at the old socket."""

CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of SO_PEERCRED (unix(7))."""


class NobodyAnswered(MountError):
    """Nobody listens at a mount's socket, or whoever did ended before the answer was whole."""


def socket_path(runtime_dir: Path, mountpoint: Path) -> Path:
    """Where the mount at `mountpoint` has its control socket. The hash keeps it short whatever the mount point."""
    digest = hashlib.sha256(resolve(mountpoint)).hexdigest()[:16]
    return runtime_dir / digest / "control.sock"


def mount_lock(runtime_dir: Path, mountpoint: Path) -> Path:
    """Held by whoever looks at the mount point in order to mount there (`mountpoint.claim`)."""
    return socket_path(runtime_dir, mountpoint).with_name("mount.lock")


def find_socket(mount: MountInfo, runtime_dir: Path) -> Path:
    """Control socket of a mount, also of another user's. MountError when there is none where it may lie; NobodyAnswered
    where its folder is.

    Looked for in `runtime_dir`, in the default folders of root and of the user who mounted, and where the mount's own
    `.fusecache/config` says. That file is written by whoever mounted: what it names counts only when the process that
    listens there is of that user.
    """
    mountpoint = Path(os.fsdecode(mount.mountpoint))
    owner = mount.owner
    folders = [runtime_dir, Path("/run/fusecache")]
    if owner:
        folders.append(Path(f"/run/user/{owner}/fusecache"))
        with suppress(KeyError):
            folders.append(Path(pwd.getpwuid(owner).pw_dir) / ".local/state/fusecache/run")
    for folder in folders:
        candidate = socket_path(folder, mountpoint)
        if candidate.is_socket():
            return candidate
    told = _told_by_mount(mountpoint)
    if told is not None and _listener_uid(told) == owner:
        return told
    is_expected = any(socket_path(folder, mountpoint).parent.is_dir() for folder in folders)
    raise (NobodyAnswered if is_expected else MountError)(
        f"the control socket of {str(mountpoint)!r} is not in {', '.join(map(str, dict.fromkeys(folders)))}; "
        "give the --runtime-dir it was mounted with"
    )


def ask(mount: MountInfo, runtime_dir: Path, kind: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
    """`call` to a mount, wherever its socket is. For commands: the question is asked again when nobody answered it
    although the mount lives, because it is being handed over, or its agent was started anew.

    Every kind can be asked twice (`daemon.control.Handler`). Errors of `find_socket` and `call`.
    """
    deadline = time.monotonic() + timeout_s
    for number in itertools.count(1):
        try:
            return _call(find_socket(mount, runtime_dir), kind, deadline, timeout_s, fields)
        except NobodyAnswered:
            if number == MOST_TRIES or not _lives(mount):
                raise
        time.sleep(AGAIN_S)
    raise AssertionError("unreachable: the tries end by a return or an error")


def call(path: Path, kind: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
    """One request and its answer. The error of the daemon is raised as it named it.

    NobodyAnswered: see there. InterruptedWait: no answer within `timeout_s`. ProtocolError: the answer is no answer.
    """
    return _call(path, kind, time.monotonic() + timeout_s, timeout_s, fields)


def _call(path: Path, kind: str, deadline: float, timeout_s: float, fields: dict[str, Any]) -> dict[str, Any]:
    request = json.dumps({"kind": kind, **fields}).encode() + b"\n"
    try:
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as failure:  # no descriptors left: whoever asks every few seconds must not end by that
        raise MountError(f"the daemon at {path} can't be asked now: {failure.strerror}") from None
    with ours as connection:
        try:
            _limit(connection, deadline)
            with short_address(path) as address:
                connection.connect(address)
            connection.sendall(request)
            line = _read_line(connection, deadline)
        except TimeoutError:
            raise InterruptedWait(f"the daemon at {path} did not answer {kind!r} within {timeout_s:g} s") from None
        except OSError as failure:
            raise NobodyAnswered(f"the daemon at {path} can't be asked: {failure.strerror}; is it running?") from None
    if line is None:
        raise NobodyAnswered(f"the daemon at {path} went away before it had answered {kind!r}; is it running?")
    try:
        reply = json.loads(line)
    except ValueError:
        raise ProtocolError(f"the daemon at {path} answered {kind!r} with {line[:80]!r}, which is not JSON") from None
    if not isinstance(reply, dict):
        raise ProtocolError(f"the daemon at {path} answered {kind!r} with {line[:80]!r}, which is no object")
    if reply.pop("ok", False) is not True:
        raise errors.named(str(reply.get("type")), str(reply.get("error")))
    return reply


def _lives(mount: MountInfo) -> bool:
    """Whether it is still there, with somebody who serves it."""
    path = Path(os.fsdecode(mount.mountpoint))
    there = find_mount(path)
    return there is not None and there.device == mount.device and probe(path, READ_S) == "ok"


def _told_by_mount(mountpoint: Path) -> Path | None:
    """The socket that `.fusecache/config` names; None when it can't be read or names none."""
    content = read_inside(mountpoint / ".fusecache" / "config", READ_S)
    try:
        told = json.loads(content or b"")["control_socket"]
    except (ValueError, LookupError, TypeError):
        return None
    return Path(told) if isinstance(told, str) and told.startswith("/") and "\0" not in told else None


def _listener_uid(path: Path) -> int | None:
    """The user whose process listens at `path`, as the kernel knows it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(READ_S)
        try:
            with short_address(path) as address:
                connection.connect(address)
            _, uid, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
        except OSError:
            return None
    return int(uid)


def _read_line(connection: socket.socket, deadline: float) -> bytes | None:
    """None: the other side closed first."""
    pieces: list[bytes] = []
    size_bytes = 0
    while True:
        _limit(connection, deadline)
        piece = connection.recv(65536)
        end = piece.find(b"\n")
        if end >= 0:
            pieces.append(piece[:end])
            return b"".join(pieces)
        pieces.append(piece)
        size_bytes += len(piece)
        if not piece:
            return None
        if size_bytes > MAX_REPLY:
            return b"".join(pieces)  # too much: no JSON


def _limit(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
