"""Handlers as gRPC methods: serialisers, and our errors as statuses, both in one place.

What a handler raises becomes what a real server would answer: an error of `fusecache.errors` its status,
anything else INTERNAL with one logged traceback, so that a bug never ends the server or leaves a call
without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc
import structlog

from fusecache import errors

log = structlog.get_logger(__name__)

_CODES: tuple[tuple[type[errors.FusecacheError], grpc.StatusCode], ...] = (
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.AuthenticationFailed, grpc.StatusCode.UNAUTHENTICATED),
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.UpstreamError, grpc.StatusCode.UNKNOWN),
)


def code_of(exc: Exception) -> grpc.StatusCode:
    """The status that answers an error."""
    for kind, code in _CODES:
        if isinstance(exc, kind):
            return code
    return grpc.StatusCode.INTERNAL


def one_answer(handler: Callable[[Any, Any], Any], request: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with one request (of the given message class) and one answer."""

    def answer(message: Any, context: Any) -> Any:
        try:
            return handler(message, context)
        except Exception as exc:  # noqa: BLE001 - every error must become a status; _abort logs what is a bug
            _abort(context, exc)

    return grpc.unary_unary_rpc_method_handler(answer, request.FromString, _serialize)


def answer_stream(handler: Callable[[Any, Any], Iterator[Any]], request: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with one request and a stream of answers."""
    return grpc.unary_stream_rpc_method_handler(_guarded(handler), request.FromString, _serialize)


def two_streams(handler: Callable[[Any, Any], Iterator[Any]], request: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with a stream of requests and a stream of answers."""
    return grpc.stream_stream_rpc_method_handler(_guarded(handler), request.FromString, _serialize)


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


def _guarded(handler: Callable[[Any, Any], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
    def answers(requests: Any, context: Any) -> Iterator[Any]:
        try:
            yield from handler(requests, context)
        except Exception as exc:  # noqa: BLE001 - every error must become a status; _abort logs what is a bug
            _abort(context, exc)

    return answers


def _abort(context: Any, exc: Exception) -> NoReturn:
    if not context.is_active():
        # The client is gone (cancelled, or the server stops): nobody is left to answer.
        raise exc
    if not isinstance(exc, errors.FusecacheError):
        log.error("handler failed", exc_info=exc)
    context.abort(code_of(exc), str(exc) or type(exc).__name__)
    raise AssertionError("abort returned")
