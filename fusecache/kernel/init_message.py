"""FUSE_INIT: the kernel's first request and the one answer it gets. Pure: bytes in, bytes out.

    kernel's INIT -> what workers are shown -> a worker's (libfuse's) answer -> what the kernel gets

The request is kept for as long as the mount lives and shown to every worker; only the first answer goes to the kernel.
libfuse 3.14 can't ask for what came after it, so its answer is patched: the second word of flags, passthrough, the
number of background requests, the request size. What a mask leaves out is left out on both ways.

Layouts: struct fuse_in_header, fuse_init_in, fuse_out_header, fuse_init_out of include/uapi/linux/fuse.h (7.36 and
later; an older kernel reads the part of the answer that it knows). Version numbers of flags are in the tables below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fusecache.kernel.features import KNOWN_FEATURES, PRESETS, KernelVersion

OPCODE: Final = 26
"""FUSE_INIT."""

MAJOR: Final = 7
LEAST_MINOR: Final = 23
"""Linux 3.15; the answer's layout below has its full 64 bytes since then."""

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding."""

INIT_IN: Final = struct.Struct("<IIII")
"""major, minor, max_readahead, flags; 7.36 appends flags2 and 11 unused words."""

OUT_HEADER: Final = struct.Struct("<IiQ")
"""len, error, unique."""

INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth, request_timeout."""

INIT_OUT_BYTES: Final = 64
LEAST_OUT_BYTES: Final = 24
"""FUSE_COMPAT_22_INIT_OUT_SIZE: up to max_write."""

ASYNC_READ: Final = 1 << 0
WRITEBACK_CACHE: Final = 1 << 16
MAX_PAGES: Final = 1 << 22
INIT_EXT: Final = 1 << 30
PASSTHROUGH: Final = 1 << 37

PAGE_BYTES: Final = 4096

MINOR_SINCE: Final[Mapping[int, KernelVersion]] = {
    24: (4, 5), 25: (4, 7), 26: (4, 9), 27: (4, 18), 28: (4, 20), 29: (5, 1), 30: (5, 2), 31: (5, 4), 32: (5, 10),
    33: (5, 12), 34: (5, 14), 35: (5, 16), 36: (5, 17), 37: (6, 1), 38: (6, 2), 39: (6, 6), 40: (6, 9), 41: (6, 12),
    42: (6, 14), 43: (6, 15), 44: (6, 16), 45: (6, 18),
}  # fmt: skip
"""Protocol minor -> Linux version that brought it."""

FLAGS_SINCE: Final[Mapping[int, KernelVersion]] = {
    # Bits 0-22 are of Linux 4.20 and earlier.
    23: (4, 20), 24: (5, 1), 25: (5, 2), 26: (5, 10), 27: (5, 10), 28: (5, 11), 29: (5, 12), 30: (5, 17), 32: (5, 17),
    33: (5, 17), 34: (6, 3), 35: (6, 2), 36: (6, 6), 37: (6, 9), 38: (6, 9), 39: (6, 9), 40: (6, 12), 41: (6, 14),
    42: (6, 15),
}  # fmt: skip
"""Bit of INIT's flags -> Linux version that brought it; a bit that is not listed and above 22 is newer than all."""

OLD_BITS: Final = (1 << 23) - 1


class InitError(ValueError):
    """Bytes that are no INIT request, or no usable answer to one; the text says which field and value."""


class InitRequest(NamedTuple):
    """The kernel's INIT."""

    unique: int
    major: int
    minor: int
    max_readahead_bytes: int
    flags: int
    """Both words, as 64 bits."""


@dataclass(frozen=True, kw_only=True)
class InitPlan:
    """What the answer to the kernel must say. Travels as JSON in the gate's settings."""

    kernel_flags: int
    """What the (masked) request offered: nothing else may be answered."""

    kernel_minor: int
    unique: int
    max_readahead_bytes: int
    """The kernel takes the smaller of this and its own offer."""

    max_background: int
    congestion_threshold: int
    max_pages: int
    """Pages of one request; 0 where the kernel lets nobody choose (32 then)."""

    passthrough: bool
    """Ask for FUSE_PASSTHROUGH, with backing files of one level of stacking."""


def parse_request(message: bytes) -> InitRequest:
    """Read the kernel's INIT. InitError when it is something else or too old."""
    if len(message) < IN_HEADER.size + INIT_IN.size:
        raise InitError(f"the first request has {len(message)} bytes, INIT has {IN_HEADER.size + INIT_IN.size} or more")
    length, opcode, unique = IN_HEADER.unpack_from(message)[:3]
    if opcode != OPCODE:
        raise InitError(f"the first request has opcode {opcode}, INIT is {OPCODE}")
    if length != len(message):
        raise InitError(f"INIT says it has {length} bytes, {len(message)} came")
    major, minor, readahead, flags = INIT_IN.unpack_from(message, IN_HEADER.size)
    if major != MAJOR or minor < LEAST_MINOR:
        raise InitError(
            f"the kernel speaks FUSE {major}.{minor}, {MAJOR}.{LEAST_MINOR} or later is needed (Linux 3.15)"
        )
    if flags & INIT_EXT:
        at = IN_HEADER.size + INIT_IN.size
        if len(message) < at + 4:
            raise InitError(f"INIT with FUSE_INIT_EXT has {len(message)} bytes, {at + 4} or more are needed")
        flags |= struct.unpack_from("<I", message, at)[0] << 32
    return InitRequest(unique, major, minor, readahead, flags)


def masked_request(message: bytes, words: Iterable[str]) -> bytes:
    """The INIT as a kernel without the masked features would have sent it. InitError as `parse_request`."""
    request = parse_request(message)
    words = tuple(words)
    flags = request.flags & shown_bits(words)
    minor = min(request.minor, _shown_minor(words, request.minor))
    shown = bytearray(message)
    INIT_IN.pack_into(shown, IN_HEADER.size, request.major, minor, request.max_readahead_bytes, flags & 0xFFFFFFFF)
    at = IN_HEADER.size + INIT_IN.size
    if flags & INIT_EXT:
        struct.pack_into("<I", shown, at, flags >> 32)
    elif len(shown) > at:
        # Before 7.36 the message ended here.
        del shown[at:]
        struct.pack_into("<I", shown, 0, at)
    return bytes(shown)


def shown_bits(words: Iterable[str]) -> int:
    """The bits of INIT's flags that the mask leaves."""
    bits = (1 << 64) - 1
    for word in words:
        if word in PRESETS:
            limit = PRESETS[word]
            bits &= OLD_BITS | sum(1 << bit for bit, since in FLAGS_SINCE.items() if since <= limit)
        else:
            bits &= ~sum(known.flag for known in KNOWN_FEATURES if known.name == word)
    # Without the extension the second word does not exist.
    return bits if bits & INIT_EXT else bits & 0xFFFFFFFF


def plan_for(
    shown: bytes,
    *,
    passthrough: bool,
    max_read_bytes: int,
    read_ahead_bytes: int,
    max_background: int,
    congestion_threshold: int,
) -> InitPlan:
    """What to answer to the INIT `shown` (masked already). InitError as `parse_request`."""
    request = parse_request(shown)
    return InitPlan(
        kernel_flags=request.flags,
        kernel_minor=request.minor,
        unique=request.unique,
        max_readahead_bytes=read_ahead_bytes,
        max_background=max_background,
        congestion_threshold=min(congestion_threshold, max_background),
        max_pages=max_read_bytes // PAGE_BYTES if request.flags & MAX_PAGES else 0,
        passthrough=passthrough,
    )


def patched_answer(answer: bytes, plan: InitPlan) -> bytes:
    """A worker's answer as the kernel shall get it. InitError when it is no answer to this INIT, or an error."""
    if len(answer) < OUT_HEADER.size:
        raise InitError(f"the answer to INIT has {len(answer)} bytes, {OUT_HEADER.size + LEAST_OUT_BYTES} are needed")
    length, error, unique = OUT_HEADER.unpack_from(answer)
    if length != len(answer) or unique != plan.unique:
        raise InitError(
            f"the answer to INIT says {length} bytes for request {unique}, {len(answer)} came for request {plan.unique}"
        )
    if error:
        raise InitError(f"the worker answered INIT with error {error}")
    if not LEAST_OUT_BYTES <= len(answer) - OUT_HEADER.size <= INIT_OUT_BYTES:
        raise InitError(f"the answer to INIT has {len(answer)} bytes, {OUT_HEADER.size + INIT_OUT_BYTES} are the most")
    body = answer[OUT_HEADER.size :].ljust(INIT_OUT_BYTES, b"\0")
    major, minor, _, low_flags, _, _, max_write, grain, _, alignment, high_flags, _, timeout = INIT_OUT.unpack_from(
        body
    )
    if major != MAJOR:
        raise InitError(f"the worker answered INIT with FUSE {major}.{minor}, {MAJOR} is needed")
    flags = low_flags | (high_flags << 32 if low_flags & INIT_EXT else 0)
    flags |= INIT_EXT | ASYNC_READ | (MAX_PAGES if plan.max_pages else 0) | (PASSTHROUGH if plan.passthrough else 0)
    # The mount is read-only, and with a write-back cache the kernel refuses passthrough.
    flags &= plan.kernel_flags & ~WRITEBACK_CACHE
    if not plan.passthrough:
        flags &= ~PASSTHROUGH
    passthrough = bool(flags & PASSTHROUGH)
    if plan.passthrough and not passthrough:
        raise InitError(
            f"passthrough was asked for, the kernel's INIT (flags {plan.kernel_flags:#x}) does not offer it"
        )
    patched = bytearray(OUT_HEADER.pack(OUT_HEADER.size + INIT_OUT_BYTES, 0, plan.unique) + body)
    INIT_OUT.pack_into(
        patched,
        OUT_HEADER.size,
        major,
        min(minor, plan.kernel_minor),
        plan.max_readahead_bytes,
        flags & 0xFFFFFFFF,
        plan.max_background,
        plan.congestion_threshold,
        max_write,
        grain,
        plan.max_pages if flags & MAX_PAGES else 0,
        alignment,
        flags >> 32,
        1 if passthrough else 0,
        timeout,
    )
    return bytes(patched)


def _shown_minor(words: tuple[str, ...], minor: int) -> int:
    for word in words:
        if word in PRESETS:
            minor = min(minor, max(known for known, since in MINOR_SINCE.items() if since <= PRESETS[word]))
    return minor
