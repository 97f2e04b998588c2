from fusecache.pb.alluxio import protocol_pb2 as _protocol_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUCCESS: _ClassVar[TaskStatus]
    FAILURE: _ClassVar[TaskStatus]
    PARTIAL_FAILURE: _ClassVar[TaskStatus]
SUCCESS: TaskStatus
FAILURE: TaskStatus
PARTIAL_FAILURE: TaskStatus

class ReadRequest(_message.Message):
    __slots__ = ("block_id", "offset", "length", "promote", "chunk_size", "open_ufs_block_options", "offset_received", "position_short")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    OPEN_UFS_BLOCK_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    POSITION_SHORT_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    offset: int
    length: int
    promote: bool
    chunk_size: int
    open_ufs_block_options: _protocol_pb2.OpenUfsBlockOptions
    offset_received: int
    position_short: bool
    def __init__(self, block_id: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., promote: _Optional[bool] = ..., chunk_size: _Optional[int] = ..., open_ufs_block_options: _Optional[_Union[_protocol_pb2.OpenUfsBlockOptions, _Mapping]] = ..., offset_received: _Optional[int] = ..., position_short: _Optional[bool] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class OpenLocalBlockRequest(_message.Message):
    __slots__ = ("block_id", "promote")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    promote: bool
    def __init__(self, block_id: _Optional[int] = ..., promote: _Optional[bool] = ...) -> None: ...

class OpenLocalBlockResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    def __init__(self, path: _Optional[bytes] = ...) -> None: ...

class CacheRequest(_message.Message):
    __slots__ = ("block_id", "source_host", "source_port", "open_ufs_block_options", "length")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_HOST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PORT_FIELD_NUMBER: _ClassVar[int]
    OPEN_UFS_BLOCK_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ASYNC_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    source_host: bytes
    source_port: int
    open_ufs_block_options: _protocol_pb2.OpenUfsBlockOptions
    length: int
    def __init__(self, block_id: _Optional[int] = ..., source_host: _Optional[bytes] = ..., source_port: _Optional[int] = ..., open_ufs_block_options: _Optional[_Union[_protocol_pb2.OpenUfsBlockOptions, _Mapping]] = ..., length: _Optional[int] = ..., **kwargs) -> None: ...

class CacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "length", "ufs_path", "offset_in_file", "mountId")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    UFS_PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_IN_FILE_FIELD_NUMBER: _ClassVar[int]
    MOUNTID_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    length: int
    ufs_path: bytes
    offset_in_file: int
    mountId: int
    def __init__(self, block_id: _Optional[int] = ..., length: _Optional[int] = ..., ufs_path: _Optional[bytes] = ..., offset_in_file: _Optional[int] = ..., mountId: _Optional[int] = ...) -> None: ...

class UfsReadOptions(_message.Message):
    __slots__ = ("tag", "position_short", "bandwidth", "user")
    TAG_FIELD_NUMBER: _ClassVar[int]
    POSITION_SHORT_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tag: bytes
    position_short: bool
    bandwidth: int
    user: bytes
    def __init__(self, tag: _Optional[bytes] = ..., position_short: _Optional[bool] = ..., bandwidth: _Optional[int] = ..., user: _Optional[bytes] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("blocks", "options")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    options: UfsReadOptions
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., options: _Optional[_Union[UfsReadOptions, _Mapping]] = ...) -> None: ...

class BlockStatus(_message.Message):
    __slots__ = ("block", "code", "message", "retryable")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    block: Block
    code: int
    message: bytes
    retryable: bool
    def __init__(self, block: _Optional[_Union[Block, _Mapping]] = ..., code: _Optional[int] = ..., message: _Optional[bytes] = ..., retryable: _Optional[bool] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("status", "block_status")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATUS_FIELD_NUMBER: _ClassVar[int]
    status: TaskStatus
    block_status: _containers.RepeatedCompositeFieldContainer[BlockStatus]
    def __init__(self, status: _Optional[_Union[TaskStatus, str]] = ..., block_status: _Optional[_Iterable[_Union[BlockStatus, _Mapping]]] = ...) -> None: ...
