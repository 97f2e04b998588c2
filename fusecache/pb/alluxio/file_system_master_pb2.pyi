from fusecache.pb.alluxio import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadMetadataPType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NEVER: _ClassVar[LoadMetadataPType]
    ONCE: _ClassVar[LoadMetadataPType]
    ALWAYS: _ClassVar[LoadMetadataPType]
NEVER: LoadMetadataPType
ONCE: LoadMetadataPType
ALWAYS: LoadMetadataPType

class FileSystemMasterCommonPOptions(_message.Message):
    __slots__ = ("syncIntervalMs", "ttl", "ttlAction")
    SYNCINTERVALMS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    TTLACTION_FIELD_NUMBER: _ClassVar[int]
    syncIntervalMs: int
    ttl: int
    ttlAction: _common_pb2.TtlAction
    def __init__(self, syncIntervalMs: _Optional[int] = ..., ttl: _Optional[int] = ..., ttlAction: _Optional[_Union[_common_pb2.TtlAction, str]] = ...) -> None: ...

class FileBlockInfo(_message.Message):
    __slots__ = ("blockInfo", "offset")
    BLOCKINFO_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    blockInfo: _common_pb2.BlockInfo
    offset: int
    def __init__(self, blockInfo: _Optional[_Union[_common_pb2.BlockInfo, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("fileId", "name", "path", "ufsPath", "length", "blockSizeBytes", "creationTimeMs", "completed", "folder", "pinned", "cacheable", "persisted", "blockIds", "lastModificationTimeMs", "ttl", "owner", "group", "mode", "persistenceState", "mountPoint", "fileBlockInfos", "mountId", "inAlluxioPercentage", "inMemoryPercentage", "ufsFingerprint", "lastAccessTimeMs")
    FILEID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    UFSPATH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCKSIZEBYTES_FIELD_NUMBER: _ClassVar[int]
    CREATIONTIMEMS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CACHEABLE_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKIDS_FIELD_NUMBER: _ClassVar[int]
    LASTMODIFICATIONTIMEMS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PERSISTENCESTATE_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    FILEBLOCKINFOS_FIELD_NUMBER: _ClassVar[int]
    MOUNTID_FIELD_NUMBER: _ClassVar[int]
    INALLUXIOPERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    INMEMORYPERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    UFSFINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LASTACCESSTIMEMS_FIELD_NUMBER: _ClassVar[int]
    fileId: int
    name: bytes
    path: bytes
    ufsPath: bytes
    length: int
    blockSizeBytes: int
    creationTimeMs: int
    completed: bool
    folder: bool
    pinned: bool
    cacheable: bool
    persisted: bool
    blockIds: _containers.RepeatedScalarFieldContainer[int]
    lastModificationTimeMs: int
    ttl: int
    owner: bytes
    group: bytes
    mode: int
    persistenceState: bytes
    mountPoint: bool
    fileBlockInfos: _containers.RepeatedCompositeFieldContainer[FileBlockInfo]
    mountId: int
    inAlluxioPercentage: int
    inMemoryPercentage: int
    ufsFingerprint: bytes
    lastAccessTimeMs: int
    def __init__(self, fileId: _Optional[int] = ..., name: _Optional[bytes] = ..., path: _Optional[bytes] = ..., ufsPath: _Optional[bytes] = ..., length: _Optional[int] = ..., blockSizeBytes: _Optional[int] = ..., creationTimeMs: _Optional[int] = ..., completed: _Optional[bool] = ..., folder: _Optional[bool] = ..., pinned: _Optional[bool] = ..., cacheable: _Optional[bool] = ..., persisted: _Optional[bool] = ..., blockIds: _Optional[_Iterable[int]] = ..., lastModificationTimeMs: _Optional[int] = ..., ttl: _Optional[int] = ..., owner: _Optional[bytes] = ..., group: _Optional[bytes] = ..., mode: _Optional[int] = ..., persistenceState: _Optional[bytes] = ..., mountPoint: _Optional[bool] = ..., fileBlockInfos: _Optional[_Iterable[_Union[FileBlockInfo, _Mapping]]] = ..., mountId: _Optional[int] = ..., inAlluxioPercentage: _Optional[int] = ..., inMemoryPercentage: _Optional[int] = ..., ufsFingerprint: _Optional[bytes] = ..., lastAccessTimeMs: _Optional[int] = ...) -> None: ...

class GetStatusPOptions(_message.Message):
    __slots__ = ("loadMetadataType", "commonOptions", "accessMode", "updateTimestamps")
    LOADMETADATATYPE_FIELD_NUMBER: _ClassVar[int]
    COMMONOPTIONS_FIELD_NUMBER: _ClassVar[int]
    ACCESSMODE_FIELD_NUMBER: _ClassVar[int]
    UPDATETIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    loadMetadataType: LoadMetadataPType
    commonOptions: FileSystemMasterCommonPOptions
    accessMode: _common_pb2.Bits
    updateTimestamps: bool
    def __init__(self, loadMetadataType: _Optional[_Union[LoadMetadataPType, str]] = ..., commonOptions: _Optional[_Union[FileSystemMasterCommonPOptions, _Mapping]] = ..., accessMode: _Optional[_Union[_common_pb2.Bits, str]] = ..., updateTimestamps: _Optional[bool] = ...) -> None: ...

class GetStatusPRequest(_message.Message):
    __slots__ = ("path", "options")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    options: GetStatusPOptions
    def __init__(self, path: _Optional[bytes] = ..., options: _Optional[_Union[GetStatusPOptions, _Mapping]] = ...) -> None: ...

class GetStatusPResponse(_message.Message):
    __slots__ = ("fileInfo",)
    FILEINFO_FIELD_NUMBER: _ClassVar[int]
    fileInfo: FileInfo
    def __init__(self, fileInfo: _Optional[_Union[FileInfo, _Mapping]] = ...) -> None: ...

class ListStatusPOptions(_message.Message):
    __slots__ = ("loadMetadataType", "commonOptions", "recursive", "loadMetadataOnly")
    LOADMETADATATYPE_FIELD_NUMBER: _ClassVar[int]
    COMMONOPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    LOADMETADATAONLY_FIELD_NUMBER: _ClassVar[int]
    loadMetadataType: LoadMetadataPType
    commonOptions: FileSystemMasterCommonPOptions
    recursive: bool
    loadMetadataOnly: bool
    def __init__(self, loadMetadataType: _Optional[_Union[LoadMetadataPType, str]] = ..., commonOptions: _Optional[_Union[FileSystemMasterCommonPOptions, _Mapping]] = ..., recursive: _Optional[bool] = ..., loadMetadataOnly: _Optional[bool] = ...) -> None: ...

class ListStatusPRequest(_message.Message):
    __slots__ = ("path", "options")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    options: ListStatusPOptions
    def __init__(self, path: _Optional[bytes] = ..., options: _Optional[_Union[ListStatusPOptions, _Mapping]] = ...) -> None: ...

class ListStatusPResponse(_message.Message):
    __slots__ = ("fileInfos",)
    FILEINFOS_FIELD_NUMBER: _ClassVar[int]
    fileInfos: _containers.RepeatedCompositeFieldContainer[FileInfo]
    def __init__(self, fileInfos: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ...) -> None: ...

class GetFilePathPRequest(_message.Message):
    __slots__ = ("fileId",)
    FILEID_FIELD_NUMBER: _ClassVar[int]
    fileId: int
    def __init__(self, fileId: _Optional[int] = ...) -> None: ...

class GetFilePathPResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    def __init__(self, path: _Optional[bytes] = ...) -> None: ...

class FreePOptions(_message.Message):
    __slots__ = ("recursive", "forced", "commonOptions")
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    COMMONOPTIONS_FIELD_NUMBER: _ClassVar[int]
    recursive: bool
    forced: bool
    commonOptions: FileSystemMasterCommonPOptions
    def __init__(self, recursive: _Optional[bool] = ..., forced: _Optional[bool] = ..., commonOptions: _Optional[_Union[FileSystemMasterCommonPOptions, _Mapping]] = ...) -> None: ...

class FreePRequest(_message.Message):
    __slots__ = ("path", "options")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    options: FreePOptions
    def __init__(self, path: _Optional[bytes] = ..., options: _Optional[_Union[FreePOptions, _Mapping]] = ...) -> None: ...

class FreePResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFileInfoPOptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFileInfoPRequest(_message.Message):
    __slots__ = ("fileId", "options")
    FILEID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    fileId: int
    options: GetFileInfoPOptions
    def __init__(self, fileId: _Optional[int] = ..., options: _Optional[_Union[GetFileInfoPOptions, _Mapping]] = ...) -> None: ...

class GetFileInfoPResponse(_message.Message):
    __slots__ = ("fileInfo",)
    FILEINFO_FIELD_NUMBER: _ClassVar[int]
    fileInfo: FileInfo
    def __init__(self, fileInfo: _Optional[_Union[FileInfo, _Mapping]] = ...) -> None: ...
