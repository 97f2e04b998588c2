"""Every remote procedure this client calls: full wire name, request and answer types.

A table instead of the generated stubs: those are untyped, and a service's stub would build callables for
methods that are never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from fusecache.alluxio.chunk import data_of
from fusecache.pb.alluxio import (
    block_master_pb2,
    block_worker_pb2,
    file_system_master_pb2,
    meta_master_pb2,
    sasl_server_pb2,
    version_pb2,
)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, eq=False)
class Method(Generic[Request, Answer]):
    """One procedure; `authenticated` is False for those a server answers to anybody."""

    path: str
    serialize: Callable[[Request], bytes]
    parse_message: Callable[[bytes], Answer]
    authenticated: bool = True

    def parse(self, data: bytes) -> Answer | None:
        """An answer from the wire. None for bytes that are no such message: grpc then ends the call with INTERNAL, as
        it does after an exception, but without writing a traceback to the log for every one."""
        try:
            return self.parse_message(data)
        except DecodeError:
            return None

    @property
    def name(self) -> str:
        """The last part of the wire name, as metrics label it."""
        return self.path.rpartition("/")[2]


_FILES = "/alluxio.grpc.file.FileSystemMasterClientService/"
_FILES_FOR_WORKERS = "/alluxio.grpc.file.FileSystemMasterWorkerService/"
_BLOCKS = "/alluxio.grpc.block.BlockMasterClientService/"
_BLOCK_WORKER = "/alluxio.grpc.block.BlockWorker/"

GET_SERVICE_VERSION = Method(
    "/alluxio.grpc.version.ServiceVersionClientService/getServiceVersion",
    version_pb2.GetServiceVersionPRequest.SerializeToString,
    version_pb2.GetServiceVersionPResponse.FromString,
    authenticated=False,
)
AUTHENTICATE = Method(
    "/alluxio.grpc.sasl.SaslAuthenticationService/authenticate",
    sasl_server_pb2.SaslMessage.SerializeToString,
    sasl_server_pb2.SaslMessage.FromString,
    authenticated=False,
)
GET_STATUS = Method(
    _FILES + "GetStatus",
    file_system_master_pb2.GetStatusPRequest.SerializeToString,
    file_system_master_pb2.GetStatusPResponse.FromString,
)
LIST_STATUS = Method(
    _FILES + "ListStatus",
    file_system_master_pb2.ListStatusPRequest.SerializeToString,
    file_system_master_pb2.ListStatusPResponse.FromString,
)
GET_FILE_PATH = Method(
    _FILES + "GetFilePath",
    file_system_master_pb2.GetFilePathPRequest.SerializeToString,
    file_system_master_pb2.GetFilePathPResponse.FromString,
)
FREE = Method(
    _FILES + "Free",
    file_system_master_pb2.FreePRequest.SerializeToString,
    file_system_master_pb2.FreePResponse.FromString,
)
GET_FILE_INFO = Method(
    _FILES_FOR_WORKERS + "GetFileInfo",
    file_system_master_pb2.GetFileInfoPRequest.SerializeToString,
    file_system_master_pb2.GetFileInfoPResponse.FromString,
)
GET_WORKER_INFO_LIST = Method(
    _BLOCKS + "GetWorkerInfoList",
    block_master_pb2.GetWorkerInfoListPOptions.SerializeToString,
    block_master_pb2.GetWorkerInfoListPResponse.FromString,
)
GET_BLOCK_INFO = Method(
    _BLOCKS + "GetBlockInfo",
    block_master_pb2.GetBlockInfoPRequest.SerializeToString,
    block_master_pb2.GetBlockInfoPResponse.FromString,
)
GET_BLOCK_MASTER_INFO = Method(
    _BLOCKS + "GetBlockMasterInfo",
    block_master_pb2.GetBlockMasterInfoPOptions.SerializeToString,
    block_master_pb2.GetBlockMasterInfoPResponse.FromString,
)
GET_CONFIGURATION = Method(
    "/alluxio.grpc.meta.MetaMasterConfigurationService/GetConfiguration",
    meta_master_pb2.GetConfigurationPOptions.SerializeToString,
    meta_master_pb2.GetConfigurationPResponse.FromString,
    authenticated=False,
)
GET_MASTER_INFO = Method(
    "/alluxio.grpc.meta.MetaMasterClientService/GetMasterInfo",
    meta_master_pb2.GetMasterInfoPOptions.SerializeToString,
    meta_master_pb2.GetMasterInfoPResponse.FromString,
)
READ_BLOCK = Method(
    _BLOCK_WORKER + "ReadBlock",
    block_worker_pb2.ReadRequest.SerializeToString,
    data_of,
)
OPEN_LOCAL_BLOCK = Method(
    _BLOCK_WORKER + "OpenLocalBlock",
    block_worker_pb2.OpenLocalBlockRequest.SerializeToString,
    block_worker_pb2.OpenLocalBlockResponse.FromString,
)
CACHE = Method(
    _BLOCK_WORKER + "Cache",
    block_worker_pb2.CacheRequest.SerializeToString,
    block_worker_pb2.CacheResponse.FromString,
)
LOAD = Method(
    _BLOCK_WORKER + "Load",
    block_worker_pb2.LoadRequest.SerializeToString,
    block_worker_pb2.LoadResponse.FromString,
)
