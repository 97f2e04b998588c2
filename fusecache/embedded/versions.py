"""The version service of a master or block worker: clients check it before anything else.

Version numbers are Alluxio 2.9's (Constants.java); a service this server does not have is NOT_FOUND, by which
clients tell a block worker from a master.
"""

from __future__ import annotations

from typing import Any

import grpc

from fusecache.embedded.rpc_methods import one_answer
from fusecache.errors import NotFound
from fusecache.pb.alluxio import version_pb2 as pb

MASTER_VERSIONS: dict[int, int] = {
    pb.FILE_SYSTEM_MASTER_CLIENT_SERVICE: 2,
    pb.FILE_SYSTEM_MASTER_WORKER_SERVICE: 2,
    pb.BLOCK_MASTER_CLIENT_SERVICE: 2,
    pb.META_MASTER_CONFIG_SERVICE: 2,
    pb.META_MASTER_CLIENT_SERVICE: 2,
}
WORKER_VERSIONS: dict[int, int] = {pb.BLOCK_WORKER_CLIENT_SERVICE: 1}


def version_service(versions: dict[int, int]) -> grpc.GenericRpcHandler:
    """The service for one server, answering from a table."""

    def get_service_version(request: pb.GetServiceVersionPRequest, _context: Any) -> pb.GetServiceVersionPResponse:
        if request.serviceType not in versions:
            raise NotFound(f"Service {pb.ServiceType.Name(request.serviceType)} is not found.")
        return pb.GetServiceVersionPResponse(version=versions[request.serviceType])

    methods = {"getServiceVersion": one_answer(get_service_version, pb.GetServiceVersionPRequest)}
    return grpc.method_handlers_generic_handler("alluxio.grpc.version.ServiceVersionClientService", methods)
