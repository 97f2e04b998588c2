from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN_SERVICE: _ClassVar[ServiceType]
    FILE_SYSTEM_MASTER_CLIENT_SERVICE: _ClassVar[ServiceType]
    FILE_SYSTEM_MASTER_WORKER_SERVICE: _ClassVar[ServiceType]
    BLOCK_MASTER_CLIENT_SERVICE: _ClassVar[ServiceType]
    META_MASTER_CONFIG_SERVICE: _ClassVar[ServiceType]
    META_MASTER_CLIENT_SERVICE: _ClassVar[ServiceType]
    BLOCK_WORKER_CLIENT_SERVICE: _ClassVar[ServiceType]
UNKNOWN_SERVICE: ServiceType
FILE_SYSTEM_MASTER_CLIENT_SERVICE: ServiceType
FILE_SYSTEM_MASTER_WORKER_SERVICE: ServiceType
BLOCK_MASTER_CLIENT_SERVICE: ServiceType
META_MASTER_CONFIG_SERVICE: ServiceType
META_MASTER_CLIENT_SERVICE: ServiceType
BLOCK_WORKER_CLIENT_SERVICE: ServiceType

class GetServiceVersionPRequest(_message.Message):
    __slots__ = ("serviceType", "allowedOnStandbyMasters")
    SERVICETYPE_FIELD_NUMBER: _ClassVar[int]
    ALLOWEDONSTANDBYMASTERS_FIELD_NUMBER: _ClassVar[int]
    serviceType: ServiceType
    allowedOnStandbyMasters: bool
    def __init__(self, serviceType: _Optional[_Union[ServiceType, str]] = ..., allowedOnStandbyMasters: _Optional[bool] = ...) -> None: ...

class GetServiceVersionPResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
