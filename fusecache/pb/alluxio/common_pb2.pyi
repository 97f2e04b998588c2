from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TtlAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELETE: _ClassVar[TtlAction]
    FREE: _ClassVar[TtlAction]
    DELETE_ALLUXIO: _ClassVar[TtlAction]

class Bits(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BITS_NONE: _ClassVar[Bits]
    BITS_EXECUTE: _ClassVar[Bits]
    BITS_WRITE: _ClassVar[Bits]
    BITS_WRITE_EXECUTE: _ClassVar[Bits]
    BITS_READ: _ClassVar[Bits]
    BITS_READ_EXECUTE: _ClassVar[Bits]
    BITS_READ_WRITE: _ClassVar[Bits]
    BITS_ALL: _ClassVar[Bits]
DELETE: TtlAction
FREE: TtlAction
DELETE_ALLUXIO: TtlAction
BITS_NONE: Bits
BITS_EXECUTE: Bits
BITS_WRITE: Bits
BITS_WRITE_EXECUTE: Bits
BITS_READ: Bits
BITS_READ_EXECUTE: Bits
BITS_READ_WRITE: Bits
BITS_ALL: Bits

class LocalityTier(_message.Message):
    __slots__ = ("tierName", "value")
    TIERNAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    tierName: bytes
    value: bytes
    def __init__(self, tierName: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class TieredIdentity(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[LocalityTier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[LocalityTier, _Mapping]]] = ...) -> None: ...

class WorkerNetAddress(_message.Message):
    __slots__ = ("host", "rpcPort", "dataPort", "webPort", "domainSocketPath", "tieredIdentity", "containerHost")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RPCPORT_FIELD_NUMBER: _ClassVar[int]
    DATAPORT_FIELD_NUMBER: _ClassVar[int]
    WEBPORT_FIELD_NUMBER: _ClassVar[int]
    DOMAINSOCKETPATH_FIELD_NUMBER: _ClassVar[int]
    TIEREDIDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONTAINERHOST_FIELD_NUMBER: _ClassVar[int]
    host: bytes
    rpcPort: int
    dataPort: int
    webPort: int
    domainSocketPath: bytes
    tieredIdentity: TieredIdentity
    containerHost: bytes
    def __init__(self, host: _Optional[bytes] = ..., rpcPort: _Optional[int] = ..., dataPort: _Optional[int] = ..., webPort: _Optional[int] = ..., domainSocketPath: _Optional[bytes] = ..., tieredIdentity: _Optional[_Union[TieredIdentity, _Mapping]] = ..., containerHost: _Optional[bytes] = ...) -> None: ...

class NetAddress(_message.Message):
    __slots__ = ("host", "rpcPort")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RPCPORT_FIELD_NUMBER: _ClassVar[int]
    host: bytes
    rpcPort: int
    def __init__(self, host: _Optional[bytes] = ..., rpcPort: _Optional[int] = ...) -> None: ...

class BlockLocation(_message.Message):
    __slots__ = ("workerId", "workerAddress", "tierAlias", "mediumType")
    WORKERID_FIELD_NUMBER: _ClassVar[int]
    WORKERADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIERALIAS_FIELD_NUMBER: _ClassVar[int]
    MEDIUMTYPE_FIELD_NUMBER: _ClassVar[int]
    workerId: int
    workerAddress: WorkerNetAddress
    tierAlias: bytes
    mediumType: bytes
    def __init__(self, workerId: _Optional[int] = ..., workerAddress: _Optional[_Union[WorkerNetAddress, _Mapping]] = ..., tierAlias: _Optional[bytes] = ..., mediumType: _Optional[bytes] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("blockId", "length", "locations")
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    blockId: int
    length: int
    locations: _containers.RepeatedCompositeFieldContainer[BlockLocation]
    def __init__(self, blockId: _Optional[int] = ..., length: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[BlockLocation, _Mapping]]] = ...) -> None: ...

class ConfigProperty(_message.Message):
    __slots__ = ("name", "source", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    source: bytes
    value: bytes
    def __init__(self, name: _Optional[bytes] = ..., source: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...
