"""What the supervisor is told: one mount, as JSON in a memfd whose descriptor is named on its command line.

Written by the daemon, which has resolved configuration, flags and environment; read once by `supervisor`. A memfd, not
argv, because argv is readable by everybody, and not a pipe, because the writer is replaced (exec) by the reader.

Checks types and ranges only: whether the mount point is usable, the daemon has looked at before, and the kernel says.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from fusecache.errors import UsageError
from fusecache.kernel.features import OPEN_MODES, Features, check_words
from fusecache.kernel.privileges import Identity

PAGE_BYTES: Final = 4096
MAX_SPEC_BYTES: Final = 1 << 20
"""A specification is a few kilobytes; more is not one."""

MAX_WORKERS: Final = 64
MOST_ID: Final = 2**32 - 2
"""Of users and groups; 2**32 - 1 means "unchanged" to the kernel."""

MAX_READ_BYTES: Final = 1 << 20
"""256 pages, the kernel's limit of one request (fs.fuse.max_pages_limit may be raised, which gained nothing)."""


@dataclass(frozen=True, kw_only=True)
class MountSpec:
    """One mount. Sizes in bytes, times in microseconds or seconds as named."""

    mountpoint: str
    """Absolute; bytes that are no UTF-8 as os.fsdecode makes them."""

    fsname: str
    """Shown as the source of the mount in mountinfo and df."""

    allow_other: bool
    """Other users than the one of this process may use the mount."""

    open_mode: str
    """`no-open`, `passthrough`, or `auto`: the agent chooses one of the two (`features.decide_open_mode` said so)."""

    masked_features: tuple[str, ...] = ()
    """Words of the setting kernel_features (`features.parse_mask`)."""

    features: Features
    """What the probe found; the supervisor does not probe again."""

    workers: int
    gate_argv: tuple[str, ...]
    worker_argv: tuple[str, ...]
    agent_argv: tuple[str, ...]
    """Complete command lines; the supervisor appends the flags that carry descriptors."""

    plan_fd: int
    """Memfd with the plan, passed on to agent and workers unread."""

    ready_fd: int | None = None
    """Pipe on which a parent waits (`ready` or `error CODE TEXT`)."""

    agent_socket: str
    """Path of the agent's unix socket."""

    control_socket: str
    """Path of the socket on which the agent answers commands; the supervisor makes it and takes it away."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    """Who workers and agent are, both or none; None: who the supervisor is."""

    embedded_pid: int | None = None
    """A child of this process that serves a folder SOURCE: ended last, and the mount with it when it dies."""

    embedded_argv: tuple[str, ...] = ()
    """Starts that child anew at the same address: when a take-over failed for which it was ended."""

    takeover_socket: str = ""
    """Path at which the next process takes the mount over; its folder is there, and private. Empty: nobody can."""

    takeover_s: int = 60
    """How long a process that takes over may prepare itself, before this one takes the mount back. There is no agent
    meanwhile: what neither the kernel nor the workers know waits."""

    takeover: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where another process has the mount: `line`, `descriptors` and `facts` of `takeover.new_side`. Empty: mount."""

    successor_argv: tuple[str, ...] = ()
    """Starts the next process of this mount, which reads the configuration again (`takeover.reloading`). Empty: there
    is none, and SIGHUP ends the mount."""

    command_fd: int | None = None
    """Memfd with the command that mounted, passed on to that process unread."""

    parent_reloads: bool = False
    """The process that started this one starts its successor too, and gets the SIGHUPs that come here."""

    mount_lock: str | None = None
    """Lock file held (flock) while the mount point is looked at and mounted on."""

    read_ahead_bytes: int = 1 << 20
    max_background: int = 64
    congestion_threshold: int = 48
    max_read_bytes: int = MAX_READ_BYTES
    spin_us: int = 0
    slots: int = 16
    """Shared buffers of each worker for READ data, max_read_bytes each."""

    grace_s: int = 10
    """How long requests in flight may take to finish on the way down; Kubernetes kills after 30 s by default."""

    silent_s: float = 30.0
    """A gate or agent that has not answered the supervisor, or a worker that has not taken a request, for this long is
    stuck."""

    gate_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More settings of the gate, passed on unread (`gate --settings`)."""

    log_level: str = "info"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Added to the environment of every part."""

    def __post_init__(self) -> None:
        """Raise UsageError for what can't be meant."""
        if not self.mountpoint.startswith("/"):
            raise UsageError(f"mountpoint {self.mountpoint!r} is not an absolute path")
        if self.open_mode not in OPEN_MODES:
            raise UsageError(f"open_mode {self.open_mode!r} is not one of {', '.join(OPEN_MODES)}")
        check_words(self.masked_features)
        for name, value, least, most in (
            ("workers", self.workers, 1, MAX_WORKERS),
            ("plan_fd", self.plan_fd, 0, 1 << 20),
            ("ready_fd", 0 if self.ready_fd is None else self.ready_fd, 0, 1 << 20),
            ("command_fd", 0 if self.command_fd is None else self.command_fd, 0, 1 << 20),
            ("embedded_pid", 1 if self.embedded_pid is None else self.embedded_pid, 1, 1 << 22),
            ("read_ahead_bytes", self.read_ahead_bytes, 0, 1 << 30),
            ("max_background", self.max_background, 1, (1 << 16) - 1),
            ("congestion_threshold", self.congestion_threshold, 1, (1 << 16) - 1),
            ("max_read_bytes", self.max_read_bytes, PAGE_BYTES, MAX_READ_BYTES),
            ("spin_us", self.spin_us, 0, 1_000_000),
            ("slots", self.slots, 1, 1024),
            ("grace_s", self.grace_s, 0, 3600),
            ("silent_s", self.silent_s, 1, 3600),
            ("run_as_user", 1 if self.run_as_user is None else self.run_as_user, 1, MOST_ID),
            ("run_as_group", 1 if self.run_as_group is None else self.run_as_group, 1, MOST_ID),
            ("takeover_s", self.takeover_s, 1, 3600),
        ):
            if not least <= value <= most:
                raise UsageError(f"{name} {value} is not between {least} and {most}")
        if self.max_read_bytes % PAGE_BYTES:
            raise UsageError(f"max_read_bytes {self.max_read_bytes} is not a multiple of {PAGE_BYTES}")
        if bool(self.successor_argv) != (self.command_fd is not None):
            raise UsageError("successor_argv and command_fd belong together; give both or none")
        if (self.run_as_user is None) != (self.run_as_group is None):
            raise UsageError("run_as_user and run_as_group belong together; give both or none")
        for name, command in (("gate", self.gate_argv), ("worker", self.worker_argv), ("agent", self.agent_argv)):
            if not command or not command[0]:
                raise UsageError(f"{name}_argv is empty; it names the program to run")

    @property
    def identity(self) -> Identity | None:
        """Who workers and agent are; None: who the supervisor is."""
        if self.run_as_user is None or self.run_as_group is None:
            return None
        return Identity(self.run_as_user, self.run_as_group)

    def to_json(self) -> str:
        """The specification as text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**fields, "features": self.features.to_rows()}, sort_keys=True)

    def to_memfd(self) -> int:
        """A descriptor that survives exec, for --spec-fd."""
        descriptor = os.memfd_create("fusecache-spec", 0)
        content = self.to_json().encode()
        while content:
            content = content[os.write(descriptor, content) :]
        return descriptor

    @classmethod
    def from_json(cls, text: str | bytes) -> MountSpec:
        """Read what `to_json` wrote. UsageError names what is missing, unknown or of another type."""
        try:
            given = json.loads(text)
        except ValueError as failure:
            raise UsageError(f"the mount specification is no JSON: {failure}") from None
        if not isinstance(given, dict):
            raise UsageError(f"the mount specification is {_kind(given)}, not an object")
        types = get_type_hints(cls)
        if unknown := sorted(given.keys() - types.keys()):
            raise UsageError(f"the mount specification has unknown fields: {', '.join(unknown)}")
        required = {field.name for field in dataclasses.fields(cls) if _is_required(field)}
        if missing := sorted(required - given.keys()):
            raise UsageError(f"the mount specification lacks {', '.join(missing)}")
        return cls(**{name: _converted(name, types[name], value) for name, value in given.items()})

    @classmethod
    def from_descriptor(cls, descriptor: int) -> MountSpec:
        """Read the memfd from its start, and close it. UsageError when it holds something else."""
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > MAX_SPEC_BYTES:
                raise UsageError(f"the mount specification has {size_bytes} bytes, more than {MAX_SPEC_BYTES}")
            content = os.pread(descriptor, MAX_SPEC_BYTES, 0)
            os.close(descriptor)
        except OSError as failure:
            raise UsageError(f"--spec-fd {descriptor} can't be read: {failure.strerror}") from None
        return cls.from_json(content)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _converted(name: str, hint: Any, value: Any) -> Any:
    """A JSON value as the field's type."""
    if hint is Features:
        return Features.from_rows(value)
    if hint == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return tuple(value)
        raise UsageError(f"{name} in the mount specification is {_kind(value)}, not a list of texts")
    if get_origin(hint) is Mapping:
        if isinstance(value, dict):
            return value
        raise UsageError(f"{name} in the mount specification is {_kind(value)}, not an object")
    allowed = get_args(hint) or (hint,)
    # A bool is an int in Python, and never meant as one here.
    if type(value) not in allowed:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise UsageError(f"{name} in the mount specification is {_kind(value)}, not {names}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
