"""Which errno an application sees: decided here and nowhere else.

SEMANTICS.md quotes this table. The first matching row wins, so a subclass stands above its parent; an error that
no row names is EIO.
"""

from __future__ import annotations

import errno

from fusecache.errors import (
    AuthenticationFailed,
    FusecacheError,
    Incomplete,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ProtocolError,
    StaleId,
    Unavailable,
    VersionMismatch,
)

ERRNO_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFound, errno.ENOENT, "the name or the under-storage file does not exist"),
    (StaleId, errno.ESTALE, "the file was replaced or removed; the kernel looks the path up again"),
    (PermissionDenied, errno.EACCES, "Alluxio refuses the daemon's user"),
    (Incomplete, errno.EBUSY, "the file is still being written"),
    (AuthenticationFailed, errno.EACCES, "Alluxio refuses the daemon's authentication"),
    (InvalidRequest, errno.EIO, "Alluxio calls the request malformed"),
    (ProtocolError, errno.EIO, "what Alluxio sent can't be true"),
    (VersionMismatch, errno.EIO, "the server speaks another protocol version"),
    (Unavailable, errno.EIO, "no source answered within the budget"),
    (FusecacheError, errno.EIO, "any other failure of ours"),
)
"""(exception, errno, meaning)."""


def errno_of(error: BaseException) -> int:
    """The errno for `error`; EIO for everything unknown (a bug included)."""
    for kind, number, _ in ERRNO_TABLE:
        if isinstance(error, kind):
            return number
    return errno.EIO


def errno_name(number: int) -> str:
    """EIO for 5: metric labels and logs carry names."""
    return errno.errorcode.get(number, str(number))
