"""gRPC status to our exceptions, and which failures a second try may mend."""

from __future__ import annotations

import grpc
import pytest

from fusecache.alluxio.status import MAX_TEXT, is_temporary, one_line, text_of, to_error
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

Code = grpc.StatusCode


class Failure(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed call, as grpc's own class has it but without a network."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__()
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


EXPECTED = {
    Code.CANCELLED: (Unavailable, True),
    Code.UNKNOWN: (UpstreamError, False),
    Code.INVALID_ARGUMENT: (InvalidRequest, False),
    Code.DEADLINE_EXCEEDED: (Unavailable, True),
    Code.NOT_FOUND: (NotFound, False),
    Code.ALREADY_EXISTS: (UpstreamError, False),
    Code.PERMISSION_DENIED: (PermissionDenied, False),
    Code.RESOURCE_EXHAUSTED: (Unavailable, True),
    Code.FAILED_PRECONDITION: (InvalidRequest, False),
    Code.ABORTED: (Unavailable, True),
    Code.OUT_OF_RANGE: (InvalidRequest, False),
    Code.UNIMPLEMENTED: (VersionMismatch, False),
    Code.INTERNAL: (UpstreamError, False),
    Code.UNAVAILABLE: (Unavailable, True),
    Code.DATA_LOSS: (ProtocolError, False),
    Code.UNAUTHENTICATED: (AuthenticationFailed, True),
}


def test_status_table_covers_every_code_that_is_an_error() -> None:
    assert set(EXPECTED) == set(Code) - {Code.OK}


@pytest.mark.parametrize("code", EXPECTED, ids=lambda code: code.name)
def test_status_code_becomes_its_exception(code: grpc.StatusCode) -> None:
    kind, temporary = EXPECTED[code]
    error = to_error(Failure(code, "why"), "GetStatus /a")
    assert type(error) is kind
    assert str(error) == f"GetStatus /a: why ({code.name})"
    assert is_temporary(Failure(code)) is temporary


def test_status_message_over_the_receive_limit_is_not_a_busy_server() -> None:
    failure = Failure(Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)")
    assert not is_temporary(failure)
    assert isinstance(to_error(failure, "x"), ProtocolError)


def test_status_answer_that_does_not_parse_is_a_protocol_error() -> None:
    failure = Failure(Code.INTERNAL, "Exception deserializing response!")
    assert not is_temporary(failure)
    assert isinstance(to_error(failure, "x"), ProtocolError)


def test_status_reset_stream_is_temporary_although_internal() -> None:
    assert is_temporary(Failure(Code.INTERNAL, "Received RST_STREAM with error code 2"))


def test_status_our_errors_pass_unchanged() -> None:
    error = NotFound("gone")
    assert to_error(error, "x") is error
    assert is_temporary(Unavailable("later"))
    assert not is_temporary(error)
    assert not is_temporary(ValueError("ours"))


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31mb", "x" * 10_000, b"\xff\xfe\n"])
def test_text_of_a_server_is_one_short_printable_line(text: str | bytes) -> None:
    line = one_line(text)
    assert len(line) <= MAX_TEXT
    assert line.isprintable()


def test_text_of_a_failure_is_its_details() -> None:
    assert text_of(Failure(Code.UNKNOWN, "line\nbreak")) == "line break"
