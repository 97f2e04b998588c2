from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenUfsBlockOptions(_message.Message):
    __slots__ = ("ufs_path", "offset_in_file", "block_size", "maxUfsReadConcurrency", "mountId", "no_cache", "user", "block_in_ufs_tier")
    UFS_PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_IN_FILE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAXUFSREADCONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MOUNTID_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IN_UFS_TIER_FIELD_NUMBER: _ClassVar[int]
    ufs_path: bytes
    offset_in_file: int
    block_size: int
    maxUfsReadConcurrency: int
    mountId: int
    no_cache: bool
    user: bytes
    block_in_ufs_tier: bool
    def __init__(self, ufs_path: _Optional[bytes] = ..., offset_in_file: _Optional[int] = ..., block_size: _Optional[int] = ..., maxUfsReadConcurrency: _Optional[int] = ..., mountId: _Optional[int] = ..., no_cache: _Optional[bool] = ..., user: _Optional[bytes] = ..., block_in_ufs_tier: _Optional[bool] = ...) -> None: ...
