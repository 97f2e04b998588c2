"""What a mount consists of on its way to another supervisor: the facts in the message `given`, and its descriptors.

Both are checked where they come in: the other side is another build of ours, and may be wrong.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from fusecache.kernel.channel import Message
from fusecache.kernel.init_message import InitError, InitPlan, parse_request
from fusecache.kernel.supervisor.takeover.line import close_all

_FUSE_DEVICE: Final = os.makedev(10, 229)
_LEAST_READ_BYTES: Final = 4096
_MOST_READ_BYTES: Final = 1 << 20


class BadFacts(Exception):
    """What the other side says of its mount can't be true, or not be used."""


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
