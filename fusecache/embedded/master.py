"""The master: file system, block and meta services over one namespace and its block workers.

Answers are built from the namespace (what is remembered) and from the block stores (what is held now).
Listings are streamed: entries of one message exist at a time. Permissions are not checked: whoever reaches
the port sees what this process's user sees.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from fusecache.embedded import fileinfo
from fusecache.embedded import inode as inodes
from fusecache.embedded.block_worker import BlockWorker
from fusecache.embedded.freed_blocks import FreedBlocks
from fusecache.embedded.inode import Inode
from fusecache.embedded.namespace import Load, Namespace, split_path
from fusecache.embedded.rpc_methods import answer_stream, one_answer
from fusecache.embedded.source import SourceFolder
from fusecache.errors import InvalidRequest, NotFound, UpstreamError
from fusecache.pb.alluxio import block_master_pb2, file_system_master_pb2, meta_master_pb2
from fusecache.pb.alluxio.common_pb2 import BlockInfo, BlockLocation, ConfigProperty, NetAddress
from fusecache.pb.alluxio.file_system_master_pb2 import FileInfo, FileSystemMasterCommonPOptions

VERSION = b"2.9.3"
"""The Alluxio version whose protocol is spoken."""


class Master:
    """All services of the master's port."""

    def __init__(
        self,
        namespace: Namespace,
        source: SourceFolder,
        workers: Sequence[BlockWorker],
        *,
        entries_per_message: int,
        configuration: dict[str, str],
        freed: FreedBlocks,
    ) -> None:
        self.port = 0
        self._namespace = namespace
        self._source = source
        self._workers = workers
        self._entries_per_message = entries_per_message
        self._configuration = configuration
        self._freed = freed
        self._started_ms = time.time_ns() // 1_000_000

    def services(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The gRPC services."""
        files, blocks, meta = file_system_master_pb2, block_master_pb2, meta_master_pb2
        table: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
            "alluxio.grpc.file.FileSystemMasterClientService": {
                "GetStatus": one_answer(self.get_status, files.GetStatusPRequest),
                "ListStatus": answer_stream(self.list_status, files.ListStatusPRequest),
                "GetFilePath": one_answer(self.get_file_path, files.GetFilePathPRequest),
                "Free": one_answer(self.free, files.FreePRequest),
            },
            "alluxio.grpc.file.FileSystemMasterWorkerService": {
                "GetFileInfo": one_answer(self.get_file_info, files.GetFileInfoPRequest),
            },
            "alluxio.grpc.block.BlockMasterClientService": {
                "GetWorkerInfoList": one_answer(self.get_worker_info_list, blocks.GetWorkerInfoListPOptions),
                "GetBlockInfo": one_answer(self.get_block_info, blocks.GetBlockInfoPRequest),
                "GetBlockMasterInfo": one_answer(self.get_block_master_info, blocks.GetBlockMasterInfoPOptions),
            },
            "alluxio.grpc.meta.MetaMasterConfigurationService": {
                "GetConfiguration": one_answer(self.get_configuration, meta.GetConfigurationPOptions),
            },
            "alluxio.grpc.meta.MetaMasterClientService": {
                "GetMasterInfo": one_answer(self.get_master_info, meta.GetMasterInfoPOptions),
            },
        }
        return tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in table.items())

    # -- files ---------------------------------------------------------------------------------------------

    def get_status(
        self, request: file_system_master_pb2.GetStatusPRequest, _context: Any
    ) -> file_system_master_pb2.GetStatusPResponse:
        """Status of one path."""
        options = request.options
        inode = self._namespace.get(
            request.path, _load(options.loadMetadataType), _sync_interval_ms(options.commonOptions)
        )
        path = b"/" + b"/".join(split_path(request.path))
        return file_system_master_pb2.GetStatusPResponse(fileInfo=self._file_info(inode, path))

    def list_status(
        self, request: file_system_master_pb2.ListStatusPRequest, _context: Any
    ) -> Iterator[file_system_master_pb2.ListStatusPResponse]:
        """Children of a folder (or the file itself), some thousand a message; no message when there are none."""
        options = request.options
        listing = self._namespace.list_folder(
            request.path,
            _load(options.loadMetadataType),
            _sync_interval_ms(options.commonOptions),
            self._entries_per_message,
        )
        folders: list[bytes] = []
        for parent, batch in listing:
            prefix = parent.rstrip(b"/") + b"/"
            if options.recursive:
                folders.extend(prefix + inode.name for inode in batch if inode.folder)
            if not options.loadMetadataOnly:
                yield file_system_master_pb2.ListStatusPResponse(
                    fileInfos=[self._file_info(inode, prefix + inode.name) for inode in batch]
                )
        for folder in folders:
            below = file_system_master_pb2.ListStatusPRequest(path=folder, options=options)
            yield from self.list_status(below, _context)

    def get_file_path(
        self, request: file_system_master_pb2.GetFilePathPRequest, _context: Any
    ) -> file_system_master_pb2.GetFilePathPResponse:
        """Path of an id, without a look at the source."""
        return file_system_master_pb2.GetFilePathPResponse(path=self._namespace.path_of(request.fileId))

    def get_file_info(
        self, request: file_system_master_pb2.GetFileInfoPRequest, _context: Any
    ) -> file_system_master_pb2.GetFileInfoPResponse:
        """Status of an id, without a look at the source."""
        inode = self._namespace.by_id(request.fileId)
        info = self._file_info(inode, self._namespace.path_of(inode.id))
        return file_system_master_pb2.GetFileInfoPResponse(fileInfo=info)

    def free(self, request: file_system_master_pb2.FreePRequest, _context: Any) -> file_system_master_pb2.FreePResponse:
        """Drop the cached blocks of a file, or of all files below a folder."""
        inode = self._namespace.get(request.path, Load.NEVER, -1)
        if inode.folder and inode.children and not request.options.recursive:
            raise UpstreamError(
                f"Cannot free directory {request.path.decode(errors='replace')} which is not empty."
                ' Please set the "recursive" flag of free operation to true'
            )
        for file in self._namespace.files_below(inode, recursive=True):
            self._freed.add(file)
        return file_system_master_pb2.FreePResponse()

    def _file_info(self, inode: Inode, path: bytes) -> FileInfo:
        return fileinfo.file_info(inode, path, self._source.ufs_path(path), self._locate)

    def _locate(self, block_id: int) -> list[BlockLocation]:
        return [worker.location() for worker in self._workers if worker.store.holds(block_id)]

    # -- blocks --------------------------------------------------------------------------------------------

    def get_worker_info_list(
        self, _request: block_master_pb2.GetWorkerInfoListPOptions, _context: Any
    ) -> block_master_pb2.GetWorkerInfoListPResponse:
        """All block workers."""
        return block_master_pb2.GetWorkerInfoListPResponse(
            workerInfos=[
                block_master_pb2.WorkerInfo(
                    id=worker.worker_id,
                    address=worker.address(),
                    lastContactSec=0,
                    state=b"In Service",
                    capacityBytes=worker.store.capacity_bytes,
                    usedBytes=worker.store.used_bytes,
                    startTimeMs=self._started_ms,
                )
                for worker in self._workers
            ]
        )

    def get_block_info(
        self, request: block_master_pb2.GetBlockInfoPRequest, _context: Any
    ) -> block_master_pb2.GetBlockInfoPResponse:
        """Length and places of a block of a current file."""
        block = request.blockId
        try:
            inode = self._namespace.by_id(inodes.file_of_block(block))
        except NotFound as exc:
            raise InvalidRequest(f"BlockMeta not found for blockId {block}") from exc
        index = block & inodes.LAST_SEQUENCE
        if index >= inode.block_count:
            raise InvalidRequest(f"BlockMeta not found for blockId {block}")
        info = BlockInfo(blockId=block, length=inode.block_length(index), locations=self._locate(block))
        return block_master_pb2.GetBlockInfoPResponse(blockInfo=info)

    def get_block_master_info(
        self, request: block_master_pb2.GetBlockMasterInfoPOptions, _context: Any
    ) -> block_master_pb2.GetBlockMasterInfoPResponse:
        """Capacity of all block workers; only the fields asked for, or all when none is named."""
        capacity = sum(worker.store.capacity_bytes for worker in self._workers)
        used = sum(worker.store.used_bytes for worker in self._workers)
        wanted: set[int] = set(request.filters) or set(block_master_pb2.BlockMasterInfoField.values())
        info = block_master_pb2.BlockMasterInfo()
        if block_master_pb2.CAPACITY_BYTES in wanted:
            info.capacityBytes = capacity
        if block_master_pb2.FREE_BYTES in wanted:
            info.freeBytes = capacity - used
        if block_master_pb2.USED_BYTES in wanted:
            info.usedBytes = used
        if block_master_pb2.LIVE_WORKER_NUM in wanted:
            info.liveWorkerNum = len(self._workers)
        return block_master_pb2.GetBlockMasterInfoPResponse(blockMasterInfo=info)

    # -- meta ----------------------------------------------------------------------------------------------

    def get_configuration(
        self, _request: meta_master_pb2.GetConfigurationPOptions, _context: Any
    ) -> meta_master_pb2.GetConfigurationPResponse:
        """The cluster's configuration: what a client might want to know."""
        return meta_master_pb2.GetConfigurationPResponse(
            clusterConfigs=[
                ConfigProperty(name=name.encode(), source=b"CLUSTER_DEFAULT", value=value.encode())
                for name, value in sorted(self._configuration.items())
            ]
        )

    def get_master_info(
        self, _request: meta_master_pb2.GetMasterInfoPOptions, _context: Any
    ) -> meta_master_pb2.GetMasterInfoPResponse:
        """Who this cluster is."""
        address = NetAddress(host=b"127.0.0.1", rpcPort=self.port)
        info = meta_master_pb2.MasterInfo(
            leaderMasterAddress=f"127.0.0.1:{self.port}".encode(),
            masterAddresses=[address],
            rpcPort=self.port,
            safeMode=False,
            startTimeMs=self._started_ms,
            upTimeMs=time.time_ns() // 1_000_000 - self._started_ms,
            version=VERSION,
            webPort=0,
            clusterId=self._namespace.cluster_id.encode(),
        )
        return meta_master_pb2.GetMasterInfoPResponse(masterInfo=info)


def _load(wire: int) -> Load:
    return Load(wire)


def _sync_interval_ms(options: FileSystemMasterCommonPOptions) -> int | None:
    """None when the request leaves it to the server."""
    return options.syncIntervalMs if options.HasField("syncIntervalMs") else None
