"""What a failed call means: gRPC status to our exceptions, and whether a second try may help.

The only place that knows which codes are temporary. Source of the rules: Alluxio 2.9 AlluxioStatusException
(which Java exception becomes which code) and AbstractClient (which codes its own client retries).
"""

from __future__ import annotations

import grpc

from fusecache.errors import (
    AuthenticationFailed,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ProtocolError,
    Unavailable,
    UpstreamError,
    VersionMismatch,
)
from fusecache.rpc.conversation import CallFailed

MAX_TEXT = 256
"""Characters kept of a server's error text: it goes into logs and terminals."""

Code = grpc.StatusCode

_ERRORS: dict[grpc.StatusCode, type[UpstreamError]] = {
    Code.NOT_FOUND: NotFound,
    Code.PERMISSION_DENIED: PermissionDenied,
    Code.UNAUTHENTICATED: AuthenticationFailed,
    Code.INVALID_ARGUMENT: InvalidRequest,
    Code.FAILED_PRECONDITION: InvalidRequest,
    Code.OUT_OF_RANGE: InvalidRequest,
    Code.UNIMPLEMENTED: VersionMismatch,
    Code.DATA_LOSS: ProtocolError,
    Code.UNAVAILABLE: Unavailable,
    Code.DEADLINE_EXCEEDED: Unavailable,
    Code.CANCELLED: Unavailable,
    Code.ABORTED: Unavailable,
    Code.RESOURCE_EXHAUSTED: Unavailable,
    Code.INTERNAL: UpstreamError,
    Code.UNKNOWN: UpstreamError,
}

_TEMPORARY = frozenset(
    {
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
        # A server that shuts down cancels what runs; we ourselves cancel only calls nobody waits for any more.
        Code.CANCELLED,
        Code.ABORTED,
        # "Busy": thread pools of the server are full.
        Code.RESOURCE_EXHAUSTED,
        # The session ended (server restarted, id purged): the connection makes a new one and gives up by itself
        # with AuthenticationFailed when that does not help.
        Code.UNAUTHENTICATED,
    }
)


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code of a failed call; UNKNOWN when the error carries none."""
    if isinstance(error, (grpc.Call, CallFailed)):
        code = error.code()
        if isinstance(code, grpc.StatusCode):
            return code
    return Code.UNKNOWN


def text_of(error: BaseException) -> str:
    """The server's text as one printable line of at most MAX_TEXT characters."""
    details = error.details() if isinstance(error, (grpc.Call, CallFailed)) else str(error)
    return one_line(details or "")


def one_line(text: str | bytes) -> str:
    """Any text from the network, safe to print: control characters replaced, cut to MAX_TEXT characters."""
    if isinstance(text, bytes):
        text = text[: MAX_TEXT * 4].decode("utf-8", "replace")
    cut = text[: MAX_TEXT + 1]
    clean = "".join(c if c.isprintable() else " " for c in cut)
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 1] + "…"


def is_temporary(error: BaseException) -> bool:
    """True when the same request may succeed later or elsewhere without anybody changing anything."""
    if isinstance(error, Unavailable):
        return True
    if not isinstance(error, grpc.RpcError):
        return False
    code = code_of(error)
    if _is_too_large(code, error):
        return False
    if code is Code.INTERNAL:
        # HTTP/2 streams reset by a proxy or a dying server arrive as INTERNAL; a handler's own exception does too.
        return "RST_STREAM" in text_of(error)
    return code in _TEMPORARY


def to_error(error: BaseException, what: str) -> UpstreamError:
    """Our exception for a failed call; `what` says in words what was asked of whom.

    Errors of ours pass through unchanged.
    """
    if isinstance(error, UpstreamError):
        return error
    code = code_of(error)
    if _is_too_large(code, error) or _is_undecodable(code, error):
        return ProtocolError(f"{what}: {text_of(error)}")
    kind = _ERRORS.get(code, UpstreamError)
    return kind(f"{what}: {text_of(error) or 'no reason given'} ({code.name})")


def _is_too_large(code: grpc.StatusCode, error: BaseException) -> bool:
    # grpc's own refusal of a message over the receive limit shares its code with a busy server.
    return code is Code.RESOURCE_EXHAUSTED and "larger than max" in text_of(error)


def _is_undecodable(code: grpc.StatusCode, error: BaseException) -> bool:
    # grpc's word for an answer that `Method.parse` refused.
    return code is Code.INTERNAL and "deserializing response" in text_of(error)
