"""SASL handshakes and the channel-id check of one server (master or block worker).

As Alluxio: a client opens one `authenticate` stream per channel, names itself, and keeps the stream open;
every other call carries its channel id in the metadata. The id is forgotten when the stream ends, however it
ends. The user name is taken as is and decides nothing here: the server sees whatever its own user sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc

from fusecache.embedded.rpc_methods import two_streams
from fusecache.errors import AuthenticationFailed
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, CUSTOM, SIMPLE, SUCCESS, SaslMessage

SASL_SERVICE = "alluxio.grpc.sasl.SaslAuthenticationService"
OPEN_SERVICES = (
    SASL_SERVICE,
    "alluxio.grpc.version.ServiceVersionClientService",
    "alluxio.grpc.meta.MetaMasterConfigurationService",
)
"""Services that answer without authentication."""


class Authentication(grpc.ServerInterceptor):
    """The authenticated channels of one server."""

    def __init__(self, impersonators: Collection[str] = ()) -> None:
        """`impersonators`: users that may speak for any other user."""
        self._users: dict[str, str] = {}
        self._impersonators = frozenset(impersonators)
        self._lock = threading.Lock()
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(self._refuse_missing)

    def service(self) -> grpc.GenericRpcHandler:
        """The SASL service of this server."""
        methods = {"authenticate": two_streams(self._authenticate, SaslMessage)}
        return grpc.method_handlers_generic_handler(SASL_SERVICE, methods)

    def users(self) -> list[str]:
        """Who is authenticated now, one entry a channel."""
        with self._lock:
            return sorted(self._users.values())

    def forget_all(self) -> None:
        """Forget every channel, as a restarted server has: the next call on each is UNAUTHENTICATED."""
        with self._lock:
            self._users.clear()

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Let a call through when its service needs no authentication or its channel id is known."""
        method: str = handler_call_details.method
        if method[1 : method.rfind("/")] in OPEN_SERVICES:
            return continuation(handler_call_details)
        channel_id = ""
        for key, value in handler_call_details.invocation_metadata:
            if key == "channel-id":
                channel_id = value
        if channel_id in self._users:
            return continuation(handler_call_details)
        return self._refuse_unknown(channel_id, method) if channel_id else self._refuse

    def _authenticate(self, messages: Iterator[SaslMessage], context: Any) -> Iterator[SaslMessage]:
        first = next(messages, None)
        if first is None:
            return
        channel_id, user = self._check(first)
        with self._lock:
            if channel_id in self._users:
                # As the real one: the id is spoilt for both.
                del self._users[channel_id]
                raise AuthenticationFailed(f"Channel: {channel_id} is already authenticated.")
            self._users[channel_id] = user
        try:
            yield SaslMessage(messageType=SUCCESS)
            for _ in messages:
                pass
        finally:
            with self._lock:
                self._users.pop(channel_id, None)

    def _check(self, first: SaslMessage) -> tuple[str, str]:
        """(channel id, user) of a first message; AuthenticationFailed says what is wrong with it."""
        if first.messageType != CHALLENGE or not first.clientId:
            raise AuthenticationFailed("The first message must be a challenge with a client id.")
        if first.authenticationScheme not in (SIMPLE, CUSTOM):
            raise AuthenticationFailed("Authentication scheme:NOSASL is not supported")
        parts = first.message.split(b"\0")
        if len(parts) != 3:
            raise AuthenticationFailed("Plain authentication failed: Invalid message format, 3 parts expected")
        authorized, user, password = (part.decode(errors="replace") for part in parts)
        if not user or not password:
            raise AuthenticationFailed("Plain authentication failed: No user name or no password provided")
        if authorized and authorized != user and user not in self._impersonators:
            raise AuthenticationFailed(
                f'Plain authentication failed: User "{user}" is not configured to impersonate "{authorized}"'
            )
        return first.clientId.decode(errors="replace"), authorized or user

    @staticmethod
    def _refuse_missing(_request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "Channel Id is missing for call.")

    @staticmethod
    def _refuse_unknown(channel_id: str, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        def refuse(_request: Any, context: Any) -> None:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"Channel: {channel_id} is not authenticated for call: {method[1:]}"
            )

        return grpc.unary_unary_rpc_method_handler(refuse)
