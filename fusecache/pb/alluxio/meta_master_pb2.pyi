from fusecache.pb.alluxio import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetConfigurationPOptions(_message.Message):
    __slots__ = ("rawValue", "ignoreClusterConf", "ignorePathConf")
    RAWVALUE_FIELD_NUMBER: _ClassVar[int]
    IGNORECLUSTERCONF_FIELD_NUMBER: _ClassVar[int]
    IGNOREPATHCONF_FIELD_NUMBER: _ClassVar[int]
    rawValue: bool
    ignoreClusterConf: bool
    ignorePathConf: bool
    def __init__(self, rawValue: _Optional[bool] = ..., ignoreClusterConf: _Optional[bool] = ..., ignorePathConf: _Optional[bool] = ...) -> None: ...

class GetConfigurationPResponse(_message.Message):
    __slots__ = ("clusterConfigs", "clusterConfigHash", "pathConfigHash")
    CLUSTERCONFIGS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERCONFIGHASH_FIELD_NUMBER: _ClassVar[int]
    PATHCONFIGHASH_FIELD_NUMBER: _ClassVar[int]
    clusterConfigs: _containers.RepeatedCompositeFieldContainer[_common_pb2.ConfigProperty]
    clusterConfigHash: bytes
    pathConfigHash: bytes
    def __init__(self, clusterConfigs: _Optional[_Iterable[_Union[_common_pb2.ConfigProperty, _Mapping]]] = ..., clusterConfigHash: _Optional[bytes] = ..., pathConfigHash: _Optional[bytes] = ...) -> None: ...

class GetMasterInfoPOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MasterInfo(_message.Message):
    __slots__ = ("leaderMasterAddress", "masterAddresses", "rpcPort", "safeMode", "startTimeMs", "upTimeMs", "version", "webPort", "clusterId")
    LEADERMASTERADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTERADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RPCPORT_FIELD_NUMBER: _ClassVar[int]
    SAFEMODE_FIELD_NUMBER: _ClassVar[int]
    STARTTIMEMS_FIELD_NUMBER: _ClassVar[int]
    UPTIMEMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEBPORT_FIELD_NUMBER: _ClassVar[int]
    CLUSTERID_FIELD_NUMBER: _ClassVar[int]
    leaderMasterAddress: bytes
    masterAddresses: _containers.RepeatedCompositeFieldContainer[_common_pb2.NetAddress]
    rpcPort: int
    safeMode: bool
    startTimeMs: int
    upTimeMs: int
    version: bytes
    webPort: int
    clusterId: bytes
    def __init__(self, leaderMasterAddress: _Optional[bytes] = ..., masterAddresses: _Optional[_Iterable[_Union[_common_pb2.NetAddress, _Mapping]]] = ..., rpcPort: _Optional[int] = ..., safeMode: _Optional[bool] = ..., startTimeMs: _Optional[int] = ..., upTimeMs: _Optional[int] = ..., version: _Optional[bytes] = ..., webPort: _Optional[int] = ..., clusterId: _Optional[bytes] = ...) -> None: ...

class GetMasterInfoPResponse(_message.Message):
    __slots__ = ("masterInfo",)
    MASTERINFO_FIELD_NUMBER: _ClassVar[int]
    masterInfo: MasterInfo
    def __init__(self, masterInfo: _Optional[_Union[MasterInfo, _Mapping]] = ...) -> None: ...
