from fusecache.pb.alluxio import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockMasterInfoField(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPACITY_BYTES: _ClassVar[BlockMasterInfoField]
    FREE_BYTES: _ClassVar[BlockMasterInfoField]
    LIVE_WORKER_NUM: _ClassVar[BlockMasterInfoField]
    USED_BYTES: _ClassVar[BlockMasterInfoField]
CAPACITY_BYTES: BlockMasterInfoField
FREE_BYTES: BlockMasterInfoField
LIVE_WORKER_NUM: BlockMasterInfoField
USED_BYTES: BlockMasterInfoField

class WorkerInfo(_message.Message):
    __slots__ = ("id", "address", "lastContactSec", "state", "capacityBytes", "usedBytes", "startTimeMs")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LASTCONTACTSEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITYBYTES_FIELD_NUMBER: _ClassVar[int]
    USEDBYTES_FIELD_NUMBER: _ClassVar[int]
    STARTTIMEMS_FIELD_NUMBER: _ClassVar[int]
    id: int
    address: _common_pb2.WorkerNetAddress
    lastContactSec: int
    state: bytes
    capacityBytes: int
    usedBytes: int
    startTimeMs: int
    def __init__(self, id: _Optional[int] = ..., address: _Optional[_Union[_common_pb2.WorkerNetAddress, _Mapping]] = ..., lastContactSec: _Optional[int] = ..., state: _Optional[bytes] = ..., capacityBytes: _Optional[int] = ..., usedBytes: _Optional[int] = ..., startTimeMs: _Optional[int] = ...) -> None: ...

class GetWorkerInfoListPOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerInfoListPResponse(_message.Message):
    __slots__ = ("workerInfos",)
    WORKERINFOS_FIELD_NUMBER: _ClassVar[int]
    workerInfos: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workerInfos: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class GetBlockInfoPOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlockInfoPRequest(_message.Message):
    __slots__ = ("blockId", "options")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    blockId: int
    options: GetBlockInfoPOptions
    def __init__(self, blockId: _Optional[int] = ..., options: _Optional[_Union[GetBlockInfoPOptions, _Mapping]] = ...) -> None: ...

class GetBlockInfoPResponse(_message.Message):
    __slots__ = ("blockInfo",)
    BLOCKINFO_FIELD_NUMBER: _ClassVar[int]
    blockInfo: _common_pb2.BlockInfo
    def __init__(self, blockInfo: _Optional[_Union[_common_pb2.BlockInfo, _Mapping]] = ...) -> None: ...

class BlockMasterInfo(_message.Message):
    __slots__ = ("capacityBytes", "freeBytes", "liveWorkerNum", "usedBytes")
    CAPACITYBYTES_FIELD_NUMBER: _ClassVar[int]
    FREEBYTES_FIELD_NUMBER: _ClassVar[int]
    LIVEWORKERNUM_FIELD_NUMBER: _ClassVar[int]
    USEDBYTES_FIELD_NUMBER: _ClassVar[int]
    capacityBytes: int
    freeBytes: int
    liveWorkerNum: int
    usedBytes: int
    def __init__(self, capacityBytes: _Optional[int] = ..., freeBytes: _Optional[int] = ..., liveWorkerNum: _Optional[int] = ..., usedBytes: _Optional[int] = ...) -> None: ...

class GetBlockMasterInfoPOptions(_message.Message):
    __slots__ = ("filters",)
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    filters: _containers.RepeatedScalarFieldContainer[BlockMasterInfoField]
    def __init__(self, filters: _Optional[_Iterable[_Union[BlockMasterInfoField, str]]] = ...) -> None: ...

class GetBlockMasterInfoPResponse(_message.Message):
    __slots__ = ("blockMasterInfo",)
    BLOCKMASTERINFO_FIELD_NUMBER: _ClassVar[int]
    blockMasterInfo: BlockMasterInfo
    def __init__(self, blockMasterInfo: _Optional[_Union[BlockMasterInfo, _Mapping]] = ...) -> None: ...
