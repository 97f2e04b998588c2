"""The SASL handshake: who we are, once per channel and server, and the stream that keeps it true.

The client opens a bidi stream, sends one message (PLAIN, a fresh channel id), and gets SUCCESS. From then on
every call carries `channel-id`. The server forgets the id when the stream ends, so the stream stays open for
as long as the session is used; a session that ended is never revived, its successor has another id (a second
registration of one id makes the server drop the first).

`opening_message` and `next_state` are pure; `SaslSession` drives them over a channel. Deciding when to shake
hands again is `alluxio.connection`'s.
"""

from __future__ import annotations

import enum
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import grpc

from fusecache.alluxio.methods import AUTHENTICATE
from fusecache.alluxio.status import code_of, text_of
from fusecache.errors import AuthenticationFailed, ProtocolError, Unavailable, UsageError
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, SIMPLE, SUCCESS, SaslMessage

PASSWORD = "noPassword"
"""What Alluxio's own client sends; the server does not look at it but refuses an empty one."""

CHANNEL_ID_HEADER = "channel-id"

Scheme = Literal["auto", "simple", "nosasl"]


class Login(NamedTuple):
    """As whom to speak."""

    user: str
    impersonate: str
    """"" = as `user` itself."""
    scheme: Scheme


class State(enum.Enum):
    """Where a handshake is."""

    ASKED = "asked"
    AUTHENTICATED = "authenticated"


class AuthenticationOff(Exception):
    """The server does not know the SASL service: it runs with authentication off. Never leaves `alluxio`."""


def check_login(login: Login) -> Login:
    """UsageError when a name can't be put into a PLAIN message."""
    for setting, name in (("user", login.user), ("impersonate", login.impersonate)):
        if "\0" in name:
            raise UsageError(f"{setting}: {name!r} contains a NUL character")
    if not login.user:
        raise UsageError("user: an empty user name can't log in")
    return login


def opening_message(login: Login, channel_id: str) -> SaslMessage:
    """The only message a client sends: SASL PLAIN `authzid NUL authcid NUL password`."""
    plain = f"{login.impersonate}\0{login.user}\0{PASSWORD}".encode()
    return SaslMessage(
        messageType=CHALLENGE,
        authenticationScheme=SIMPLE,
        clientId=channel_id.encode(),
        channelRef=b"fusecache",
        message=plain,
    )


def next_state(state: State, message: SaslMessage) -> State:
    """The state after a message from the server. PLAIN has one step: anything but one SUCCESS is an error."""
    if state is State.AUTHENTICATED:
        raise ProtocolError("server sent another message after it had accepted the login")
    if message.messageType != SUCCESS:
        raise AuthenticationFailed("server asks for more than a user name: only SIMPLE and NOSASL are supported")
    return State.AUTHENTICATED


class SaslSession:
    """One registration of one channel at one server, alive while its stream is.

    The stream's request side needs a thread in grpcio anyway; that thread also reads the answers, so a session
    costs one thread, not two.
    """

    def __init__(self, channel: grpc.Channel, login: Login, on_end: Callable[[SaslSession], None]) -> None:
        self.channel_id = str(uuid.uuid4())
        self.metadata = ((CHANNEL_ID_HEADER, self.channel_id),)
        self._opening = opening_message(login, self.channel_id)
        self._on_end = on_end
        self._state = State.ASKED
        self._failure: Exception | None = None
        self._decided = threading.Event()
        self._calls: queue.SimpleQueue[Iterator[SaslMessage] | None] = queue.SimpleQueue()
        stub = channel.stream_stream(
            AUTHENTICATE.path, request_serializer=AUTHENTICATE.serialize, response_deserializer=AUTHENTICATE.parse
        )
        call: Any = stub(self._converse())
        self._cancel: Callable[[], object] = call.cancel
        self._calls.put(call)
        call.add_done_callback(self._call_ended)

    def wait(self, timeout_s: float, target: str) -> None:
        """Until the server has accepted. AuthenticationOff, AuthenticationFailed, Unavailable or ProtocolError."""
        if not self._decided.wait(timeout_s):
            self.close()
            raise Unavailable(f"{target}: no answer to the login within {timeout_s:.1f} s")
        failure = self._failure
        if failure is None:
            return
        self.close()
        if isinstance(failure, grpc.RpcError):
            raise _login_error(failure, target) from failure
        raise type(failure)(f"{target}: {failure}") from failure

    def close(self) -> None:
        """End the stream: the server forgets the id at once."""
        self._cancel()

    def _call_ended(self, call: Any) -> None:
        """Runs in a grpc thread. A call that fails before the opening is sent (connection refused or reset) never
        resumes `_converse`: without this the login would wait out its whole limit instead of failing at once."""
        if self._state is State.ASKED and call.code() is not grpc.StatusCode.OK and not self._decided.is_set():
            self._failure = call  # grpcio's call object is the RpcError that its iterator would raise
            self._decided.set()

    def _converse(self) -> Iterator[SaslMessage]:
        """Runs in grpcio's thread for the request side: sends the opening, then reads until the stream ends."""
        yield self._opening
        call = self._calls.get()
        failure: Exception | None = None
        try:
            if call is not None:
                for message in call:
                    self._state = next_state(self._state, message)
                    self._decided.set()
        except (grpc.RpcError, AuthenticationFailed, ProtocolError) as error:
            failure = error
        if self._state is State.ASKED:
            self._failure = failure or Unavailable("server ended the login without an answer")
            self._decided.set()
        elif isinstance(failure, ProtocolError):
            self._cancel()
        self._on_end(self)


def _login_error(error: grpc.RpcError, target: str) -> Exception:
    code = code_of(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return AuthenticationOff()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AuthenticationFailed(f"{target}: login refused: {text_of(error)}")
    return Unavailable(f"{target}: login failed: {text_of(error) or 'no reason given'} ({code.name})")
