"""The handshake as a step function: what is sent, what may come back."""

from __future__ import annotations

import pytest

from fusecache.alluxio.sasl import Login, State, check_login, next_state, opening_message
from fusecache.errors import AuthenticationFailed, ProtocolError, UsageError
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, SIMPLE, SUCCESS, SaslMessage

ALICE = Login("alice", "", "auto")


def test_opening_plain_user_names_user_and_a_password_that_is_not_empty() -> None:
    message = opening_message(ALICE, "id-1")
    assert message.message == b"\0alice\0noPassword"
    assert message.clientId == b"id-1"
    assert message.messageType == CHALLENGE
    assert message.authenticationScheme == SIMPLE


def test_opening_impersonation_goes_first() -> None:
    message = opening_message(Login("alice", "böb", "auto"), "id-1")
    assert message.message == "böb\0alice\0noPassword".encode()


def test_step_success_authenticates() -> None:
    assert next_state(State.ASKED, SaslMessage(messageType=SUCCESS)) is State.AUTHENTICATED


@pytest.mark.parametrize("message", [SaslMessage(), SaslMessage(messageType=CHALLENGE, message=b"more")])
def test_step_another_challenge_is_refused(message: SaslMessage) -> None:
    with pytest.raises(AuthenticationFailed):
        next_state(State.ASKED, message)


@pytest.mark.parametrize("kind", [SUCCESS, CHALLENGE])
def test_step_anything_after_success_is_a_protocol_error(kind: int) -> None:
    with pytest.raises(ProtocolError):
        next_state(State.AUTHENTICATED, SaslMessage(messageType=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "login",
    [Login("", "", "auto"), Login("a\0b", "", "auto"), Login("alice", "b\0", "auto")],
    ids=["empty", "nul", "nul2"],
)
def test_login_name_that_plain_cannot_carry_is_a_usage_error(login: Login) -> None:
    with pytest.raises(UsageError):
        check_login(login)
