"""What a part of a mount may do: give rights up in a forked child before its program starts, and tell what one has.

    workers, agent   `give_up`: another user and group (run_as_user), no supplementary groups, no capability in any set
    gate             `keep_for_gate`: root with two capabilities, and a network name space with nothing in it
    every part       no_new_privs: no setuid program gives anything back

Behind it stands that workers and agent read what the network sends. Rights are given up between fork and exec, so that
no line of their programs runs with them, and cannot be had back: the bounding set is empty, and the user is not root.

Reads no setting: who becomes whom is `spec`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from fusecache.errors import UsageError

CAPABILITIES: Final = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner",
    "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice",
    "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap",
    "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf",
    "checkpoint_restore",
)  # fmt: skip
"""Names by number (include/uapi/linux/capability.h, without CAP_)."""

NEEDED_TO_GIVE_UP: Final = ("setuid", "setgid", "setpcap", "kill")
"""Of the supervisor: to become another user, to empty the bounding set, and to end what then belongs to that user."""

OF_THE_GATE: Final = ("sys_admin", "dac_read_search")
"""To register backing files, and to open again those that workers could read by rights of their own."""

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_CLONE_NEWNET: Final = 0x40000000
_MOST_CAPABILITIES: Final = 64

_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """Who workers and agent are."""

    uid: int
    gid: int


class Rights(NamedTuple):
    """What a process is and may do, as /proc tells."""

    uid: int
    gid: int
    capabilities: tuple[str, ...]
    """That it has or can have without another program's help (permitted)."""

    no_new_privileges: bool

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        return {**self._asdict(), "capabilities": list(self.capabilities)}


def check_can_give_up(identity: Identity) -> None:
    """Raise UsageError unless this process may start others as `identity`."""
    if os.geteuid() != 0:
        raise UsageError(
            f"run_as_user {identity.uid}: only root can run workers as another user, and this is uid {os.geteuid()}; "
            "leave it out, then they are this user's too"
        )
    own = rights_of(os.getpid())
    missing = [name for name in NEEDED_TO_GIVE_UP if own is not None and name not in own.capabilities]
    if missing:
        names = ", ".join(f"CAP_{name.upper()}" for name in missing)
        raise UsageError(f"run_as_user {identity.uid}: this process lacks {names}; allow it, or leave run_as_user out")


def give_up(identity: Identity | None) -> None:
    """Become `identity` for good; None = stay who one is, and only gain nothing any more. In the child. OSError."""
    if identity is not None:
        os.setgroups(())
        _drop_from_bounding_set(range(_MOST_CAPABILITIES))
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
        # Leaving uid 0 clears them, unless securebits say otherwise; the inheritable set stays in any case.
        _set_no_capabilities()
        _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    _gain_nothing()


def keep_for_gate() -> None:
    """Keep what the gate needs and nothing else, as far as this process may give the rest up. In the child. OSError.

    All of it takes 1 ms, on a busy machine of two cores; three quarters are the empty network name space. What this
    process has no right to give up is kept: the gate has no more than its parent then, and `status` shows it.
    """
    _libc.unshare(_CLONE_NEWNET)
    with contextlib.suppress(PermissionError):
        kept = {CAPABILITIES.index(name) for name in OF_THE_GATE}
        _drop_from_bounding_set(number for number in range(_MOST_CAPABILITIES) if number not in kept)
    _gain_nothing()


def rights_of(pid: int) -> Rights | None:
    """Rights of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
        return Rights(
            uid=int(fields["Uid"].split()[1]),
            gid=int(fields["Gid"].split()[1]),
            capabilities=_named(int(fields["CapPrm"], 16)),
            no_new_privileges=fields.get("NoNewPrivs", "0").strip() == "1",
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _named(mask: int) -> tuple[str, ...]:
    names = [CAPABILITIES[number] if number < len(CAPABILITIES) else str(number) for number in _bits(mask)]
    return tuple(names)


def _bits(mask: int) -> Iterable[int]:
    return (number for number in range(mask.bit_length()) if mask >> number & 1)


def _drop_from_bounding_set(numbers: Iterable[int]) -> None:
    for number in numbers:
        if _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:  # -1: this kernel has no such capability
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))


def _set_no_capabilities() -> None:
    """capset(2): struct __user_cap_header_struct (version, pid), and twice struct __user_cap_data_struct."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _gain_nothing() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
