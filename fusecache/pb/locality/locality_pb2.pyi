from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_LOCAL_BLOCK_WORKER: _ClassVar[Tier]
    TIER_NODE_CACHE: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_LOCAL_BLOCK_WORKER: Tier
TIER_NODE_CACHE: Tier

class NodeReport(_message.Message):
    __slots__ = ("node_name", "session", "sequence", "full", "mounts", "datasets", "removed_datasets", "capacities", "rates", "live_directives", "version")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_DATASETS_FIELD_NUMBER: _ClassVar[int]
    CAPACITIES_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    LIVE_DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    session: int
    sequence: int
    full: bool
    mounts: _containers.RepeatedCompositeFieldContainer[Mount]
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetReport]
    removed_datasets: _containers.RepeatedScalarFieldContainer[str]
    capacities: _containers.RepeatedCompositeFieldContainer[TierCapacity]
    rates: Rates
    live_directives: _containers.RepeatedCompositeFieldContainer[LiveDirective]
    version: str
    def __init__(self, node_name: _Optional[str] = ..., session: _Optional[int] = ..., sequence: _Optional[int] = ..., full: _Optional[bool] = ..., mounts: _Optional[_Iterable[_Union[Mount, _Mapping]]] = ..., datasets: _Optional[_Iterable[_Union[DatasetReport, _Mapping]]] = ..., removed_datasets: _Optional[_Iterable[str]] = ..., capacities: _Optional[_Iterable[_Union[TierCapacity, _Mapping]]] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., live_directives: _Optional[_Iterable[_Union[LiveDirective, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class Mount(_message.Message):
    __slots__ = ("mountpoint", "ready", "reason")
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    mountpoint: str
    ready: bool
    reason: str
    def __init__(self, mountpoint: _Optional[str] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class DatasetReport(_message.Message):
    __slots__ = ("name", "ready", "total_bytes", "listed_whole", "tiers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LISTED_WHOLE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    total_bytes: int
    listed_whole: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierBytes]
    def __init__(self, name: _Optional[str] = ..., ready: _Optional[bool] = ..., total_bytes: _Optional[int] = ..., listed_whole: _Optional[bool] = ..., tiers: _Optional[_Iterable[_Union[TierBytes, _Mapping]]] = ...) -> None: ...

class TierBytes(_message.Message):
    __slots__ = ("tier", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., bytes: _Optional[int] = ...) -> None: ...

class TierCapacity(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "free_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    capacity_bytes: int
    free_bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("local_bytes_per_s", "peer_bytes_per_s", "ufs_bytes_per_s")
    LOCAL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UFS_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    local_bytes_per_s: float
    peer_bytes_per_s: float
    ufs_bytes_per_s: float
    def __init__(self, local_bytes_per_s: _Optional[float] = ..., peer_bytes_per_s: _Optional[float] = ..., ufs_bytes_per_s: _Optional[float] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("lease_transitions", "id", "gang_uid", "expires_after_ms", "report_fully")
    LEASE_TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GANG_UID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FULLY_FIELD_NUMBER: _ClassVar[int]
    lease_transitions: int
    id: str
    gang_uid: str
    expires_after_ms: int
    report_fully: ReportFully
    def __init__(self, lease_transitions: _Optional[int] = ..., id: _Optional[str] = ..., gang_uid: _Optional[str] = ..., expires_after_ms: _Optional[int] = ..., report_fully: _Optional[_Union[ReportFully, _Mapping]] = ...) -> None: ...

class ReportFully(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveDirective(_message.Message):
    __slots__ = ("id", "gang_uid", "lease_transitions")
    ID_FIELD_NUMBER: _ClassVar[int]
    GANG_UID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    gang_uid: str
    lease_transitions: int
    def __init__(self, id: _Optional[str] = ..., gang_uid: _Optional[str] = ..., lease_transitions: _Optional[int] = ...) -> None: ...

class ListLocalityRequest(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class ListLocalityResponse(_message.Message):
    __slots__ = ("rows", "nodes_reporting")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NODES_REPORTING_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[DatasetOnNode]
    nodes_reporting: int
    def __init__(self, rows: _Optional[_Iterable[_Union[DatasetOnNode, _Mapping]]] = ..., nodes_reporting: _Optional[int] = ...) -> None: ...

class DatasetOnNode(_message.Message):
    __slots__ = ("dataset", "node_name", "tier", "bytes", "total_bytes", "listed_whole", "ready", "age_ms", "counts")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LISTED_WHOLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    node_name: str
    tier: Tier
    bytes: int
    total_bytes: int
    listed_whole: bool
    ready: bool
    age_ms: int
    counts: bool
    def __init__(self, dataset: _Optional[str] = ..., node_name: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., listed_whole: _Optional[bool] = ..., ready: _Optional[bool] = ..., age_ms: _Optional[int] = ..., counts: _Optional[bool] = ...) -> None: ...

class ExplainPodRequest(_message.Message):
    __slots__ = ("namespace", "pod")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pod: str
    def __init__(self, namespace: _Optional[str] = ..., pod: _Optional[str] = ...) -> None: ...

class ExplainPodResponse(_message.Message):
    __slots__ = ("namespace", "pod", "uid", "state", "reason", "placement", "datasets", "node_name", "candidates")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pod: str
    uid: str
    state: str
    reason: str
    placement: str
    datasets: _containers.RepeatedScalarFieldContainer[str]
    node_name: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, namespace: _Optional[str] = ..., pod: _Optional[str] = ..., uid: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., placement: _Optional[str] = ..., datasets: _Optional[_Iterable[str]] = ..., node_name: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("node_name", "feasible", "refused_because", "bytes", "report_age_ms")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    FEASIBLE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    feasible: bool
    refused_because: str
    bytes: int
    report_age_ms: int
    def __init__(self, node_name: _Optional[str] = ..., feasible: _Optional[bool] = ..., refused_because: _Optional[str] = ..., bytes: _Optional[int] = ..., report_age_ms: _Optional[int] = ...) -> None: ...
