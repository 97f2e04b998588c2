"""Carries out a fault plan on the calls of one server, and lets tests rewrite what it answers.

An interceptor, installed only where a plan or a rewriter is given: a server without faults has none of this in
its way. A fault is counted when it has happened, not when it was due: a stream that ends before the byte
where it should be cut is not cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any
from urllib.parse import unquote

import grpc

from fusecache.embedded.faults import Fault, FaultPlan, FaultRule

Rewrite = Callable[[str, Any], Any]
"""(method name, answer) -> the answer to send instead."""


class Tampering(grpc.ServerInterceptor):
    """Faults and rewriting for one server: the master or one block worker."""

    def __init__(self, plan: FaultPlan | None, rewrite: Rewrite | None, worker: int) -> None:
        self._plan = plan
        self._rewrite = rewrite
        self._worker = worker

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Wrap the handler of a call that is due for a fault, or whose answers are rewritten."""
        handler = continuation(handler_call_details)
        method: str = handler_call_details.method.rpartition("/")[2]
        rule = self._plan.take(method, self._worker) if self._plan is not None else None
        if handler is None or (rule is None and self._rewrite is None):
            return handler
        if handler.response_streaming:
            behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped = self._stream(behavior, method, rule)
        else:
            make = grpc.unary_unary_rpc_method_handler
            wrapped = self._single(handler.unary_unary, method, rule)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _single(self, behavior: Any, method: str, rule: FaultRule | None) -> Any:
        def answer(request: Any, context: Any) -> Any:
            if rule is not None and rule.fault is not None:
                _before(rule, rule.fault, context)
                if rule.fault.kind in ("stall", "drop_connection"):
                    _end(rule, rule.fault, context)
            message = behavior(request, context)
            if rule is not None and rule.fault is not None and rule.fault.kind == "wrong_length":
                _change_lengths(rule, rule.fault, message)
            return message if self._rewrite is None else self._rewrite(method, message)

        return answer

    def _stream(self, behavior: Any, method: str, rule: FaultRule | None) -> Any:
        def answers(request: Any, context: Any) -> Iterator[Any]:
            if rule is not None and rule.fault is not None:
                _before(rule, rule.fault, context)
            messages = behavior(request, context)
            if rule is not None and rule.fault is not None:
                messages = _spoilt(messages, method, rule, rule.fault, context)
            for message in messages:
                yield message if self._rewrite is None else self._rewrite(method, message)

        return answers


def _before(rule: FaultRule, fault: Fault, context: Any) -> None:
    """Faults that come before the handler."""
    if fault.kind == "delay":
        rule.happened()
        _wait_for_end(context, fault.seconds)
    elif fault.kind == "error":
        rule.happened()
        context.abort(getattr(grpc.StatusCode, fault.code), fault.message)


def _spoilt(messages: Iterator[Any], method: str, rule: FaultRule, fault: Fault, context: Any) -> Iterator[Any]:
    """A stream with its fault."""
    if fault.kind in ("cut_after", "stall", "drop_connection"):
        reached = yield from _up_to(messages, fault)
        if reached:
            _end(rule, fault, context)
    elif fault.kind == "wrong_length" and method == "ReadBlock":
        yield from _resized(messages, rule, fault.by)
    else:
        for message in messages:
            if fault.kind == "wrong_length":
                _change_lengths(rule, fault, message)
            yield message


def _up_to(messages: Iterator[Any], fault: Fault) -> Generator[Any, None, bool]:
    """The part of a stream that still arrives; False when the stream ended before that point."""
    if fault.messages is not None:
        sent = 0
        while sent < fault.messages:
            message = next(messages, None)
            if message is None:
                return False
            yield message
            sent += 1
        return True
    remaining = fault.bytes
    while remaining:
        message = next(messages, None)
        if message is None:
            return False
        if len(message.chunk.data) > remaining:
            message.chunk.data = message.chunk.data[:remaining]
        remaining -= len(message.chunk.data)
        yield message
    return True


def _resized(messages: Iterator[Any], rule: FaultRule, by: int) -> Iterator[Any]:
    """A ReadBlock stream with bytes added at its end or missing there."""
    held: Any = None
    missing = max(0, -by)
    for message in messages:
        if held is not None:
            yield held
        held = message
    if held is None:
        return
    data = held.chunk.data
    held.chunk.data = data + b"\0" * by if by > 0 else data[: max(0, len(data) - missing)]
    rule.happened()
    if held.chunk.data:
        yield held


def _change_lengths(rule: FaultRule, fault: Fault, message: Any) -> None:
    """Metadata with wrong lengths of files."""
    infos = message.fileInfos if hasattr(message, "fileInfos") else [message.fileInfo]
    files = [info for info in infos if not info.folder]
    for info in files:
        info.length += fault.by
    if files:
        rule.happened()


def _end(rule: FaultRule, fault: Fault, context: Any) -> None:
    """The end of a call that is cut, stalls, or loses its connection. Returns only for a silent cut."""
    rule.happened()
    if fault.kind == "cut_after":
        if fault.code != "OK":
            context.abort(getattr(grpc.StatusCode, fault.code), fault.message)
        return
    if fault.kind == "drop_connection":
        _shut_down(context.peer())
    _wait_for_end(context, None)
    context.abort(grpc.StatusCode.UNAVAILABLE, fault.message)


def _wait_for_end(context: Any, seconds: float | None) -> None:
    """Wait until the client has given up or the server stops, at most `seconds`."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(seconds)


def _shut_down(peer: str) -> None:
    """Close the TCP connection of a client, as a crash of this server would, without ending this process.

    gRPC has no such call: the connection is found among this process's sockets by its peer's address.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            copy = os.dup(int(descriptor))
        except OSError:
            continue  # closed meanwhile
        with socket.socket(fileno=copy) as candidate, contextlib.suppress(OSError):
            if candidate.family not in (socket.AF_INET, socket.AF_INET6):
                continue  # the name of a unix socket's peer is a text
            # OSError: not connected. gRPC's sockets are IPv6 ones that show IPv4 as ::ffff:127.0.0.1.
            found = candidate.getpeername()
            if (found[0].removeprefix("::ffff:"), str(found[1])) == (host.strip("[]"), port):
                candidate.shutdown(socket.SHUT_RDWR)
