"""THE table of settings, and the shapes of the configuration file (pydantic models, frozen).

`Settings` is the table: one field is one top-level YAML key, may be given again under a mount, is a flag of
`fusecache mount` (dashes for underscores) and an environment variable (FUSECACHE_ and the key in capitals). Units are
part of the names; people may write `10GiB` or `5m`. Each description gives the reason of the default; the
README's table is generated from here (`config.reference`).

Nothing here reads a file, the environment or argv (`config.load` does) and nothing here touches the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fusecache.config.source import absolute, parse_host_port
from fusecache.config.units import parse_duration, parse_mode, parse_size

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def _absolute(value: Path) -> Path:
    return Path(absolute(os.path.expanduser(value)))


def _host_port(value: str) -> str:
    host, port = parse_host_port(value)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_address(value: str) -> str:
    parse_host_port(value, default_port=None, lowest_port=0)
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", value):
        raise ValueError("must be 1 to 63 of letters, digits, `_`, `.` and `-`, the first a letter or digit")
    return value


Name = Annotated[str, AfterValidator(_name)]
Seconds = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, le=10 * 365 * 86400)]
Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, BeforeValidator(_no_bool)]
Rate = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
Mode = Annotated[int, BeforeValidator(parse_mode), Field(ge=0, le=0o777)]
Id = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**32 - 1)]
IdButRoot = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, lt=2**32 - 1)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
AbsoluteFolder = Annotated[str, AfterValidator(lambda text: str(_absolute(Path(text))))]
HostPort = Annotated[str, AfterValidator(_host_port)]
ListenAddress = Annotated[str, AfterValidator(_listen_address)]
LogLevel = Literal["debug", "info", "warning", "error"]


class FrozenModel(BaseModel):
    """One section of the configuration: values that never change, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, hide_input_in_errors=True)


def _default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/fusecache")
    # Without HOME and an entry in passwd (a container's user) the home is /, as container runtimes have it.
    home = os.path.expanduser("~")
    return Path(os.environ.get("XDG_STATE_HOME") or Path("/", home.removeprefix("~"), ".local/state")) / "fusecache"


def _default_runtime_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/run/fusecache")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "fusecache" if runtime else _default_state_dir() / "run"


class Settings(FrozenModel):
    """Tuning and behaviour of one mount."""

    open_mode: Literal["auto", "no-open", "passthrough", "classic"] = Field(
        default="auto",
        description="How the kernel is served. `no-open`: files are opened without asking the daemon; best for many "
        "small files. `passthrough`: the kernel reads local block files itself; best for large ones (Linux 6.9). "
        "`classic`: one process under fusermount3, no privileges. `auto`: what the kernel and the process's rights "
        "allow and the mean file size suggests; `status` says what was chosen and why.",
    )
    workers: Count = Field(
        default=2,
        ge=1,
        le=64,
        description="Processes that answer the kernel's requests (not in `classic`); another one takes over when one "
        "dies or is busy.",
    )
    silent_s: Seconds = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="A process of the mount that does not turn for so long (stopped, an endless loop) prints its "
        "stacks and is replaced (not in `classic`). Other requests go on meanwhile.",
    )
    kernel_features: str = Field(
        default="",
        description="Features of the kernel not to be used, such as `-passthrough,-resend`, or those of an older one: "
        "`as-5.14`, `as-6.6`. `doctor` lists them.",
    )
    allow_other: bool | None = Field(
        default=None,
        description="Let other users in. Unset: yes when the daemon is root or /etc/fuse.conf has user_allow_other; "
        "otherwise the mount is private to its owner.",
    )

    run_as_user: IdButRoot | None = Field(
        default=None,
        description="Number of the user that workers and agent become, the processes that read what the network sends "
        "(not in `classic`): no capability, no further group. Needs root. Take one that nobody else uses and that may "
        "read the block files. Unset: who mounts, with all rights that has, for only you can name such a user.",
    )
    run_as_group: IdButRoot | None = Field(
        default=None, description="As run_as_user, for the group. Unset: the number of run_as_user."
    )

    refresh_s: Seconds = Field(
        default=600.0,
        description="A folder in use is listed again after this time, and what changed is pushed into the kernel. Ten "
        "minutes, because a master answers only some hundred calls a second and has many clients.",
    )
    sync_interval_s: Annotated[float, BeforeValidator(parse_duration), Field(ge=-1, le=10 * 365 * 86400)] = Field(
        default=300.0,
        description="Alluxio compares a folder with the under storage when its last comparison is older; -1 = never, "
        "0 = at each listing. Below refresh_s, so that a refresh finds what another client changed there.",
    )
    immutable: bool = Field(
        default=False, description="The data never changes: nothing is listed again and the kernel keeps everything."
    )
    immutable_kernel_timeout_s: Seconds = Field(
        default=86400.0, description="How long the kernel keeps names and attributes of immutable data."
    )
    stale_if_error_s: Seconds = Field(
        default=3600.0,
        description="While no master answers, metadata up to this much older than refresh_s goes on being served "
        "(counted as stale), so that a master's restart does not stop a job.",
    )
    negative_s: Seconds = Field(
        default=60.0,
        description="How long the absence of a name is remembered; a listing that shows the name ends it earlier.",
    )
    refresh_calls_per_s: Rate = Field(
        default=5.0,
        description="Most background listings a second of this mount, so that many nodes do not flood the master.",
    )

    read_budget_s: Seconds = Field(
        default=300.0, gt=0, description="Total time for the bytes of one read before EIO, over all tries and sources."
    )
    metadata_budget_s: Seconds = Field(
        default=120.0,
        gt=0,
        description="Total time for the metadata of one kernel request; outlasts a 90-second restart of the master.",
    )
    rpc_try_s: Seconds = Field(default=30.0, gt=0, description="Deadline of one try of a call.")
    stall_s: Seconds = Field(
        default=15.0,
        gt=0,
        description="A stream silent for this long is given up for the next source.",
    )
    connect_s: Seconds = Field(
        default=10.0,
        gt=0,
        description="Deadline of one connection attempt, authentication included.",
    )

    spin_us: Count | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="After a request the next one is looked for during this many microseconds before going to sleep, "
        "while requests come that fast; an idle mount never does. Unset: 100 in `classic`, where waking up costs more "
        "than answering (half more small files a second); 0 behind the gate, where two processes would look for work "
        "instead of doing it (measured on two cores: a third of the small files a second).",
    )
    read_ahead_bytes: Size = Field(
        default=MIB, ge=0, le=GIB, description="The kernel's read-ahead for the mount, where the process may set it."
    )
    max_read_bytes: Size = Field(
        default=MIB,
        ge=128 * KIB,
        le=MIB,
        description="Largest read that the kernel sends in one request (not in `classic`).",
    )
    max_background: Count = Field(
        default=64,
        ge=1,
        le=65535,
        description="Read-ahead requests that the kernel may have in flight (not in `classic`).",
    )
    congestion_threshold: Count = Field(
        default=48,
        ge=1,
        le=65535,
        description="Read-ahead requests in flight from which the kernel holds further read-ahead back (not in "
        "`classic`).",
    )
    fetch_bytes: Size = Field(
        default=4 * MIB, ge=64 * KIB, le=GIB, description="One fetch from a block worker; each costs a round trip."
    )
    chunk_bytes: Size = Field(
        default=MIB, ge=4 * KIB, le=64 * MIB, description="Bytes in one message of a block worker's stream."
    )
    read_buffer_bytes: Size = Field(
        default=256 * MIB, ge=0, description="Memory for fetched bytes that the kernel did not ask for yet."
    )

    data_threads: Count = Field(default=16, ge=1, le=1024, description="Threads that fetch file bytes.")
    metadata_threads: Count = Field(
        default=8,
        ge=1,
        le=1024,
        description="Threads for metadata, kept apart so that slow reads never delay a look-up.",
    )
    max_open_blocks: Count = Field(
        default=4096, ge=16, description="Local block files kept open; the oldest unused one is closed first."
    )

    read_type: Literal["cache", "no_cache"] = Field(
        default="cache",
        description="`cache`: a block read from the under storage is stored in Alluxio too; `no_cache`: not.",
    )
    passive_cache: bool = Field(
        default=False,
        description="Also copy a block that another node's block worker served to this node's. Off: copies push out "
        "other data and each block read costs an extra call.",
    )
    reserved_bytes: Size = Field(
        default=1056 * MIB,
        ge=0,
        description="Space a block worker must have free beyond the block to be given it (LocalFirstAvoidEviction).",
    )
    zero_rpc_reads: bool = Field(
        default=True,
        description="Open block files of this node's block worker directly, where its tier folder is visible.",
    )
    touch_interval_s: Seconds = Field(
        default=30.0,
        gt=0,
        description="How often blocks read without a call are reported to their block worker, which otherwise evicts "
        "exactly the ones in use.",
    )
    touch_calls_per_s: Rate = Field(default=20.0, description="Most such reports a second.")

    uid: Id | None = Field(
        default=None,
        description="Owner shown for files without a match in owner_map. Unset: the daemon's own uid, or 65534 "
        "(nobody) when the daemon is root.",
    )
    gid: Id | None = Field(default=None, description="As uid, for groups.")
    owner_map: dict[str, Id] = Field(
        default_factory=dict, description="Alluxio owner name -> uid. As a flag or variable: alice=1000,bob=1001."
    )
    group_map: dict[str, Id] = Field(
        default_factory=dict, description="Alluxio group name -> gid. As a flag or variable: staff=50."
    )
    map_names: bool = Field(
        default=False, description="Also look owner and group names up in this machine's passwd and group databases."
    )
    mode_mask: Mode = Field(
        default=0o555,
        description="Permission bits (octal) that may be shown; no write bits by default: the mount is read-only.",
    )

    metadata_map_bytes: Size = Field(
        default=64 * GIB,
        ge=16 * MIB,
        description="Address space of the metadata database; the file is sparse and grows with use.",
    )
    metadata_hot_entries: Count = Field(
        default=50_000, ge=100, description="Decoded entries in memory in front of the database (about 1 KiB each)."
    )

    state_dir: AbsolutePath = Field(
        default_factory=_default_state_dir,
        description="Metadata database and embedded server's state.",
        json_schema_extra={"default": "/var/lib/fusecache for root, else $XDG_STATE_HOME/fusecache"},
    )
    runtime_dir: AbsolutePath = Field(
        default_factory=_default_runtime_dir,
        description="Control sockets.",
        json_schema_extra={"default": "/run/fusecache for root, else $XDG_RUNTIME_DIR/fusecache"},
    )
    metrics_address: ListenAddress | None = Field(
        default=None,
        description="host:port for /metrics, /healthz and /readyz, such as 127.0.0.1:9464. Unset: not served over HTTP "
        "(`fusecache status` works without).",
    )
    log_level: LogLevel = Field(default="info", description="Least severe events that are logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="`auto`: text on a terminal, JSON lines elsewhere."
    )

    @field_validator("sync_interval_s")
    @classmethod
    def _minus_one_or_more(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError("must be -1 (never) or at least 0")
        return value

    @field_validator("owner_map", "group_map", mode="before")
    @classmethod
    def _map_from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in value.split(","))):
            name, separator, number = part.rpartition("=")
            if not separator or not name or not number.strip().isdigit():
                raise ValueError("not a list of name=number pairs separated by commas")
            pairs[name.strip()] = number.strip()
        return pairs


class ClusterConfig(FrozenModel):
    """How to reach one Alluxio cluster, and as whom."""

    name: Name = Field(description="Name used in CLUSTER:/path.")
    masters: tuple[HostPort, ...] = Field(
        min_length=1, description="host:port of every master (port 19998 if left out)."
    )
    user: str | None = Field(
        default=None,
        min_length=1,
        description="User to speak as. Unset: the user running the daemon.",
    )
    impersonate: str | None = Field(
        default=None,
        min_length=1,
        description="User to act for; the cluster must allow it.",
    )
    auth: Literal["auto", "simple", "nosasl"] = Field(
        default="auto", description="Authentication scheme; `auto` tries simple and falls back to nosasl."
    )
    tls: bool = Field(default=False, description="Speak TLS; on by itself when one of the tls files is given.")
    tls_ca_file: AbsolutePath | None = Field(default=None, description="Authorities to trust. Unset: the system's.")
    tls_cert_file: AbsolutePath | None = Field(default=None, description="Own certificate, with tls_key_file.")
    tls_key_file: AbsolutePath | None = Field(default=None, description="Key of the own certificate.")
    tier_folders: tuple[AbsoluteFolder, ...] = Field(
        default=(),
        description="Tier folders of this node's block worker as seen here; unset: learned from it.",
    )
    node_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names or addresses by which a block worker is this node's. Unset: own names and addresses.",
    )

    @model_validator(mode="before")
    @classmethod
    def _tls_by_its_files(cls, values: Any) -> Any:
        if isinstance(values, dict):
            files = [key for key in ("tls_ca_file", "tls_cert_file", "tls_key_file") if values.get(key) is not None]
            if files and values.get("tls") is None:
                return {**values, "tls": True}
        return values

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ClusterConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; give both or none")
        return self


class DatasetConfig(FrozenModel):
    """A named folder with its own freshness."""

    name: Name = Field(description="Name of the data set.")
    path: str = Field(description="CLUSTER:/path of its folder.")
    immutable: bool | None = Field(default=None, description="As the setting, for this folder.")
    refresh_s: Seconds | None = Field(default=None, description="As the setting, for this folder.")


class MountConfig(FrozenModel):
    """One entry of `mounts:`: what to mount where, and settings that differ from the file's."""

    source: str = Field(min_length=1, description="CLUSTER:/path, alluxio://host:port/path or a folder.")
    mountpoint: AbsolutePath = Field(description="An empty folder.")
    overrides: dict[str, Any] = Field(default_factory=dict, description="Settings keys of this mount, not yet checked.")


class MountedDataset(FrozenModel):
    """A data set that lies in, or holds, the mounted path."""

    name: str
    path: bytes
    """Absolute Alluxio path."""
    immutable: bool | None
    refresh_s: float | None


class MountPlan(FrozenModel):
    """Everything one daemon process is given."""

    cluster: ClusterConfig | None
    """None for a folder whose embedded server does not run yet."""
    folder: Path | None
    """Folder to serve through an embedded server."""
    path: bytes
    """Absolute Alluxio path to mount; b"/" for a folder."""
    mountpoint: Path
    settings: Settings
    datasets: tuple[MountedDataset, ...] = ()
    report_interval_s: float | None = None
    """How often the node reports what it holds of the data sets; None = nobody is told, and nothing is measured unless
    asked for."""

    @property
    def source(self) -> str:
        """What mountinfo shows as the source: the folder, or the cluster's URL."""
        if self.folder is not None:
            return str(self.folder)
        assert self.cluster is not None
        return f"alluxio://{','.join(self.cluster.masters)}{self.path.decode('utf-8', 'replace')}"
