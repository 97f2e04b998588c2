"""Is this host name or address this machine? Answered without asking a name server.

A resolver that does not answer would hold up the first read for seconds; whoever has names that can't be
recognised (pods, several domains) gives them in `node_hosts`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable


def own_hosts(candidates: Iterable[str]) -> frozenset[str]:
    """Those of `candidates` that name this machine."""
    hostname = socket.gethostname()
    return frozenset(host for host in candidates if host and (_same_host(host, hostname) or _own_address(host)))


def _same_host(host: str, hostname: str) -> bool:
    """Equal names; a short name equals a full one with the same first label. `localhost` is always here."""
    host, hostname = host.lower().rstrip("."), hostname.lower().rstrip(".")
    if host in (hostname, "localhost"):
        return True
    if "." in host and "." in hostname:
        return False
    return host.partition(".")[0] == hostname.partition(".")[0]


def _own_address(host: str) -> bool:
    """Only an own address can be bound; asking the kernel that way needs no list of interfaces."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
