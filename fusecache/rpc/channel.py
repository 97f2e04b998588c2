"""Makes gRPC channels: every transport option of the project, in one place.

A channel is to one server (host:port). It connects by itself when first used and reconnects by itself;
nothing here authenticates, retries or knows a message.
"""

from __future__ import annotations

import traceback
from importlib import import_module

import grpc

from fusecache.rpc.tls import TlsFiles, load_credentials

MASTER_RECEIVE_BYTES = 100 << 20
"""Largest message accepted from a master, as Alluxio's own client: 10,000 FileInfos with block locations are
far beyond grpcio's default of 4 MiB."""

BLOCK_WORKER_RECEIVE_BYTES = 8 << 20
"""Largest message accepted from a block worker: a chunk is at most 2 MiB; what is left is for lists of failed
blocks. A hostile worker can't make us hold more than this per stream."""

SEND_BYTES = 4 << 20
"""Largest message sent: a block worker refuses more (alluxio.worker.network.max.inbound.message.size)."""

STREAM_WINDOW_BYTES = 4 << 20
"""What a server may send of one stream before we have taken it; as Alluxio's reader buffer."""

KEEPALIVE_S = 45
"""Servers punish pings more often than every 30 s (alluxio.*.network.permit.keepalive.time) by closing the
connection; 45 s leaves room for their clock."""

KEEPALIVE_TIMEOUT_S = 20
"""A server that has vanished without a word is noticed within 65 s, also by streams that expect nothing for days."""

CONTROLLER_RECEIVE_BYTES = 4 << 20
"""Largest message accepted from the controller; a directive has some hundred bytes."""

CONTROLLER_KEEPALIVE_S = 20
CONTROLLER_KEEPALIVE_TIMEOUT_S = 10
"""A controller that is silent below gRPC is given up within 30 s. Its server has to permit pings this often."""

FIRST_RECONNECT_S = 1
LONGEST_RECONNECT_S = 2
"""At most one connection attempt a second, and back within 5 s once the server is: gRPC makes this up to 20 % longer,
and a caller's own pause (rpc.retry) comes on top."""


def make_channel(
    target: str,
    *,
    tls: TlsFiles | None,
    max_receive_bytes: int = MASTER_RECEIVE_BYTES,
) -> grpc.Channel:
    """A channel to `target` (host:port), plaintext HTTP/2 unless `tls` is given. No I/O but reading TLS files."""
    options = _options(max_receive_bytes, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, load_credentials(tls), options=options)


_START_THREAD = "_run_channel_spin_thread"
"""Of grpcio (1.80 to 1.85): starts the thread that serves all calls of a channel, for as long as there are any."""


def lost_its_thread(refusal: RuntimeError) -> bool:
    """Whether this is what a channel raised that could not start its thread. grpcio counts the call as under way all
    the same, and starts no thread for later ones: no call is answered again, and `close` waits for ever."""
    return any(frame.f_code.co_name == _START_THREAD for frame, _ in traceback.walk_tb(refusal.__traceback__))


def start_its_thread(channel: grpc.Channel) -> None:
    """Start it after all, once. RuntimeError when there is still none."""
    getattr(import_module(type(channel).__module__), _START_THREAD)(getattr(channel, "_call_state"))  # noqa: B009 - no part of the interface


def make_controller_channel(target: str) -> grpc.aio.Channel:
    """A channel of the running asyncio loop to the controller at `target` (host:port), plaintext HTTP/2."""
    options = _options(CONTROLLER_RECEIVE_BYTES, CONTROLLER_KEEPALIVE_S, CONTROLLER_KEEPALIVE_TIMEOUT_S)
    return grpc.aio.insecure_channel(target, options=options)


def _options(max_receive_bytes: int, keepalive_s: int, keepalive_timeout_s: int) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", SEND_BYTES),
        ("grpc.keepalive_time_ms", keepalive_s * 1000),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_s * 1000),
        # grpcio 1.85 pings in time, but waits a minute for the answer, whatever keepalive_timeout_ms says.
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_s * 1000),
        ("grpc.keepalive_permit_without_calls", 0),
        # 0 = as many pings as needed: the SASL stream is silent for days and would use up the default of 2.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_S * 1000),
        ("grpc.min_reconnect_backoff_ms", FIRST_RECONNECT_S * 1000),
        ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_S * 1000),
        # First window of a stream; the default of 64 KiB cost round trips before grpc's own estimate had grown:
        # 4 MiB fetches from a 2.9.3 block worker on the same machine went from 182 to 226 MB/s (medians of 6).
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        # Data and metadata connections, and those of two clients in one process, must not share a TCP stream.
        ("grpc.use_local_subchannel_pool", 1),
        # A cluster is reached directly; http_proxy in the environment is meant for the internet.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        # One retry loop only: rpc.retry, which has a budget.
        ("grpc.enable_retries", 0),
        # Alluxio puts Java messages into trailers; the default of 8 KiB turned a plain error into another one.
        ("grpc.max_metadata_size", 64 << 10),
    ]
