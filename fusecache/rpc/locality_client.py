"""Questions to the controller: unary calls with a deadline, for commands.

Messages go in and out as the protocol has them; every failure is one of ours. Nothing is retried: a person asks, and
asks again.
"""

from __future__ import annotations

from types import TracebackType

import grpc

from fusecache.errors import ControllerUnavailable, CoSchedulingError, ObjectMissing
from fusecache.pb.locality import locality_pb2 as pb
from fusecache.pb.locality import locality_pb2_grpc
from fusecache.rpc.channel import make_channel


class LocalityClient:
    """A connection to a controller (host:port); a context manager."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._channel = make_channel(target, tls=None)
        self._stub = locality_pb2_grpc.LocalityStub(self._channel)

    def __enter__(self) -> LocalityClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def list_locality(self, dataset: str) -> pb.ListLocalityResponse:
        """Who holds how much of a data set; of all when it is empty. ControllerUnavailable, CoSchedulingError."""
        try:
            answer: pb.ListLocalityResponse = self._stub.ListLocality(
                pb.ListLocalityRequest(dataset=dataset), timeout=self._timeout_s
            )
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        return answer

    def explain_pod(self, namespace: str, pod: str) -> pb.ExplainPodResponse:
        """Why a pod is where it is. ObjectMissing: no such pod; ControllerUnavailable, CoSchedulingError."""
        try:
            answer: pb.ExplainPodResponse = self._stub.ExplainPod(
                pb.ExplainPodRequest(namespace=namespace, pod=pod), timeout=self._timeout_s
            )
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        return answer

    def _error(self, failure: grpc.RpcError) -> CoSchedulingError:
        code = failure.code()
        text = " ".join(str(failure.details()).split())[:300]
        match code:
            case grpc.StatusCode.NOT_FOUND:
                return ObjectMissing(text)
            case grpc.StatusCode.UNAVAILABLE:
                return ControllerUnavailable(f"controller {self._target}: {text}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return ControllerUnavailable(f"controller {self._target}: no answer within {self._timeout_s:g} s")
            case _:
                return CoSchedulingError(f"controller {self._target}: {code.name}: {text}")
