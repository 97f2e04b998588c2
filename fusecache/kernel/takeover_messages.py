"""What two supervisors say to each other when a mount goes from one to the other, and the line it goes over.

    new   hello     protocols, version, source                        whether they understand each other
    old   yielding  protocols, version, open_mode                     or `refused` with a text
    old   given     the connection's facts; its descriptors           once agent and embedded server have ended
    new   ready                                                       everything runs, the gate does not read yet
    old   drained   what the gate held and had not answered, a memfd
    new   serving                                                     the old side ends without unmounting
    old   withdrawn a text, at any time: the old side goes on

One JSON object a SEQPACKET message, with descriptors (SCM_RIGHTS). Both sides send the lowest and the highest protocol
that they speak, and the highest common one counts. Fields that are not known are ignored, so that a protocol can grow;
what is known is checked: the other side is another build of ours, running as the same user, and may still be wrong.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import os
import re
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from fusecache.kernel.channel import Message, parsed
from fusecache.kernel.init_message import InitError, InitPlan, parse_request

PROTOCOLS: Final = (1, 1)
"""The lowest and the highest protocol that this build speaks."""

CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid, gid of SO_PEERCRED (unix(7)). The pid is 0 in another PID namespace."""

MOST_BYTES: Final = 64 << 10
MOST_DESCRIPTORS: Final = 4
_FUSE_DEVICE: Final = os.makedev(10, 229)
_LEAST_READ_BYTES: Final = 4096
_MOST_READ_BYTES: Final = 1 << 20
_MOST_TEXT: Final = 4096


class LineLost(Exception):
    """The other side is gone (`is_gone`), or does not take or send what it should; the text says which."""

    def __init__(self, text: str, *, is_gone: bool = False) -> None:
        super().__init__(text)
        self.is_gone = is_gone


class BadFacts(Exception):
    """What the other side says of its mount can't be true, or not be used."""


class Line:
    """One side's end. Never blocks, but in `receive_within`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Self:
        """One that came over exec."""
        return cls(socket.socket(fileno=descriptor))

    def keep_over_exec(self) -> int:
        """Its descriptor, which the program that replaces this one goes on with."""
        self._socket.set_inheritable(True)
        return self._socket.fileno()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Of the process that connected (SO_PEERCRED); 0: its PID namespace is another one."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid: int = CREDENTIALS.unpack(credentials)[0]
        return pid

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message. LineLost when it is not taken at once: a handful of messages fit into any socket."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as failure:
            gone = isinstance(failure, ConnectionError)
            raise LineLost(f"it does not take {message['kind']!r}: {failure.strerror}", is_gone=gone) from None

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, which are the caller's then; None: nothing is there yet. LineLost."""
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MOST_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as failure:
            gone = isinstance(failure, ConnectionError)
            raise LineLost(f"its line can't be read: {failure.strerror}", is_gone=gone) from None
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        message = None if flags & socket.MSG_CTRUNC else parsed(data, MOST_BYTES)
        if message is None:
            close_all(descriptors)
            if not data:
                raise LineLost("it is gone", is_gone=True)
            raise LineLost("it said something that is no message")
        return message, list(descriptors)

    def receive_within(self, within_s: float) -> tuple[Message, list[int]]:
        """The next message. LineLost, also after `within_s` seconds."""
        end_s = time.monotonic() + within_s
        while True:
            if (received := self.receive()) is not None:
                return received
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                raise LineLost(f"it did not answer within {within_s:g} s")

    def close(self) -> None:
        """The other side is told by that."""
        self._socket.close()


def close_all(descriptors: Sequence[int] | array.array[int]) -> None:
    """Close what came with a message that is not used."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def common_protocol(message: Message, ours: tuple[int, int] = PROTOCOLS) -> int | None:
    """The protocol that both sides speak, the highest one; None: there is none, or the message does not say."""
    theirs = message.get("protocols")
    if not isinstance(theirs, list) or len(theirs) != 2 or not all(type(number) is int for number in theirs):
        return None
    highest = min(theirs[1], ours[1])
    return highest if highest >= max(theirs[0], ours[0]) else None


def refusal(hello: Message, source: str) -> str | None:
    """Why the mount of `source` is not given to who says hello; None: it is."""
    if common_protocol(hello) is None:
        return (
            f"it speaks the take-over protocols {PROTOCOLS[0]} to {PROTOCOLS[1]}, and was asked in "
            f"{str(hello.get('protocols'))[:40]}"
        )
    theirs = str(hello.get("source", ""))
    if theirs != source:
        return f"it serves {source!r}, and another source ({theirs[:_MOST_TEXT]!r}) is no upgrade"
    return None


def text_of(message: Message) -> str:
    """A text of the other side, on one line."""
    return " ".join(str(message.get("text", "")).split())[:_MOST_TEXT]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is bound to the connection, and so inherited with it."""

    version: str
    """Of the old side."""

    device: str
    """major:minor of the mount."""

    open_mode: str
    allow_other: bool
    max_read_bytes: int
    init: str
    """The kernel's INIT as workers are shown it, in hexadecimal digits."""

    init_plan: dict[str, Any]
    cluster_id: str
    """What the ids of files, which are the kernel's inodes, belong to; empty: not known."""

    def to_message(self) -> Message:
        """As `given`."""
        return {"kind": "given", **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Check everything. BadFacts names the field."""
        types = {
            "version": str, "device": str, "open_mode": str, "allow_other": bool, "max_read_bytes": int, "init": str,
            "init_plan": dict, "cluster_id": str,
        }  # fmt: skip
        for name, kind in types.items():
            if type(message.get(name)) is not kind:
                raise BadFacts(f"{name} is no {kind.__name__}")
        facts = cls(**{name: message[name] for name in types})
        if not re.fullmatch(r"\d{1,4}:\d{1,7}", facts.device):
            raise BadFacts(f"device is {facts.device[:40]!r}")
        if facts.open_mode not in ("no-open", "passthrough"):
            raise BadFacts(f"open_mode is {facts.open_mode[:40]!r}")
        if not _LEAST_READ_BYTES <= facts.max_read_bytes <= _MOST_READ_BYTES or facts.max_read_bytes % 4096:
            raise BadFacts(f"max_read_bytes is {facts.max_read_bytes}")
        facts.shown_init()
        facts.plan()
        return facts

    def shown_init(self) -> bytes:
        """INIT for workers. BadFacts."""
        try:
            message = bytes.fromhex(self.init)
            parse_request(message)
        except (ValueError, InitError) as failure:
            raise BadFacts(f"init is none: {failure}") from None
        return message

    def plan(self) -> InitPlan:
        """How INIT was answered. BadFacts."""
        known = {field.name: field.type for field in dataclasses.fields(InitPlan)}
        given = {name: value for name, value in self.init_plan.items() if name in known}
        for name, kind in known.items():
            if type(given.get(name)).__name__ != kind:
                raise BadFacts(f"init_plan has no {kind} {name}")
        return InitPlan(**given)


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """What comes with `given`, in this order."""

    session: int
    """Of the connection; its mount ends with the last one."""

    gate_device: int
    """The clone that the old gate reads. The same open file: what was read there must be answered there."""

    open_table: int
    token: int

    @classmethod
    def checked(cls, descriptors: Sequence[int]) -> Self:
        """BadFacts when they are not what they must be; they are closed then."""
        try:
            if len(descriptors) != 4:
                raise BadFacts(f"{len(descriptors)} descriptors came, not 4")
            for descriptor in descriptors[:2]:
                status = os.fstat(descriptor)
                if not stat.S_ISCHR(status.st_mode) or status.st_rdev != _FUSE_DEVICE:
                    raise BadFacts("a descriptor is not one of /dev/fuse")
            if not stat.S_ISREG(os.fstat(descriptors[2]).st_mode):
                raise BadFacts("the table of opens is no memfd")
            session, gate_device, open_table, token = descriptors
        except BadFacts:
            close_all(descriptors)
            raise
        return cls(session=session, gate_device=gate_device, open_table=open_table, token=token)

    def all(self) -> tuple[int, int, int, int]:
        """In the order of the message."""
        return (self.session, self.gate_device, self.open_table, self.token)


def new_token() -> int:
    """Can be taken once (`take_token`), by whoever holds a copy of the descriptor. Not inherited."""
    return os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def take_token(token: int) -> bool:
    """Whether it was still there; from now on it is not."""
    try:
        os.eventfd_read(token)
    except BlockingIOError:
        return False
    return True
