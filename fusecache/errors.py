"""Every exception that crosses a module border, and the exit code of each.

    FusecacheError                      exit 1
    |-- UsageError                      exit 2   bad argument, bad configuration: names thing, value, what is allowed
    |-- MountError                      exit 3   mount point or /dev/fuse can't be used
    |-- StateError                      exit 4   state folder or database can't be used
    |-- InterruptedWait                 exit 5   a bounded wait ended before what it waited for
    |-- UpstreamError                   exit 6   Alluxio answered with an error, or did not answer
    |   |-- NotFound                             path or id unknown (also: a UFS file that is gone)
    |   |-- PermissionDenied                     Alluxio refuses this user
    |   |-- AuthenticationFailed                 wrong scheme, user or impersonation: final, not retried
    |   |-- InvalidRequest                       Alluxio calls our request malformed
    |   |-- StaleId                              the id no longer names a live file
    |   |-- Incomplete                           the file is still being written
    |   |-- Unavailable                          nobody could answer within the budget
    |   |-- ProtocolError                        what came back can't be true: lengths, names, offsets, ids
    |   `-- VersionMismatch                      the server speaks another major protocol
    `-- CoSchedulingError               exit 7   Kubernetes or the controller answered with an error, or did not answer
        |-- ApiUnavailable                       no answer of the API server in time, or it asks to come later
        |-- ApiRefused                           the API server does not know or does not allow this account
        |-- ObjectMissing                        no such object
        |-- PatchConflict                        the object changed meanwhile, or the API calls the change invalid
        |-- WatchExpired                         the resource version is too old: list again
        `-- ControllerUnavailable                no controller that leads answered in time

Which errno an application sees is decided in `fusecache.fs.errno_map` alone. These classes carry no gRPC
type, so that no layer above `alluxio` has to know the transport.
"""

from __future__ import annotations

import errno
import re
from typing import Final

UNEXPECTED: Final = 70
"""Exit code (EX_SOFTWARE) of a bug, and of a mount that a process of ours has failed."""

_NO_UTF8 = re.compile(r"(?<!\\)\\udc([89a-f][0-9a-f])")
"""As repr() shows such a byte (`os.fsdecode` made a surrogate of it)."""


class FusecacheError(Exception):
    """A failure with a text for people: one line, no traceback, the class's own exit code."""

    exit_code = 1
    advice = ""
    """What to do, where the class alone says it; commands show it behind the text."""


class UsageError(FusecacheError):
    """A wrong argument or setting; the text names it, its value and what is allowed."""

    exit_code = 2


class MountError(FusecacheError):
    """A mount point, /dev/fuse or fusermount3 can't be used."""

    exit_code = 3


class StateError(FusecacheError):
    """A state folder or database can't be used (rights, owner, format, space)."""

    exit_code = 4


class InterruptedWait(FusecacheError):
    """A bounded wait ended before what it waited for."""

    exit_code = 5


class UpstreamError(FusecacheError):
    """Alluxio answered with an error, or did not answer."""

    exit_code = 6


class NotFound(UpstreamError):
    """The path or id is unknown to Alluxio, or its UFS file is gone."""


class PermissionDenied(UpstreamError):
    """Alluxio refuses the operation to the user this client speaks as."""


class AuthenticationFailed(UpstreamError):
    """The SASL handshake was refused: scheme, user or impersonation. Not retried."""

    advice = "give --user, --impersonate or --auth as the cluster has them"


class InvalidRequest(UpstreamError):
    """Alluxio calls the request malformed (INVALID_ARGUMENT, FAILED_PRECONDITION)."""


class StaleId(UpstreamError):
    """The id no longer names a live file: the file was replaced or removed."""


class Incomplete(UpstreamError):
    """The file is still being written and has no readable content yet."""


class Unavailable(UpstreamError):
    """No source could answer within the budget."""

    advice = "check host and port, or run `fusecache doctor SOURCE`"


class ProtocolError(UpstreamError):
    """What the server sent can't be true; nothing of it was used."""


class VersionMismatch(UpstreamError):
    """The server's service version is not the one this client speaks."""


class CoSchedulingError(FusecacheError):
    """Kubernetes' API server, or the controller, answered with an error or did not answer."""

    exit_code = 7


class ApiUnavailable(CoSchedulingError):
    """The API server did not answer in time, failed, or asks to come later (429)."""


class ApiRefused(CoSchedulingError):
    """The API server does not know this account (401) or does not allow it the call (403)."""


class ObjectMissing(CoSchedulingError):
    """The object is not there (404)."""


class PatchConflict(CoSchedulingError):
    """The object is no longer as it was read (409, or 422 of a failed test), or the change is invalid (422).

    The API server's answer does not tell these apart: read again.
    """


class WatchExpired(CoSchedulingError):
    """What came after a resource version is no longer known (410): list again."""


class ControllerUnavailable(CoSchedulingError):
    """No controller that leads answered in time."""

    advice = "give --controller HOST:PORT, and check that a controller runs and leads (/readyz)"


def told(failure: FusecacheError) -> str:
    """The one line for people: the text, and the class's advice. Bytes that are no UTF-8 are shown as \\xff."""
    text = _NO_UTF8.sub(r"\\x\1", " ".join(str(failure).split()))
    return f"{text}; {failure.advice}" if failure.advice else text


def lacking(failure: OSError) -> str | None:
    """One line when this machine has no more of something, which is no bug; None: it is something else."""
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        advice = "ulimit -n, LimitNOFILE=" if failure.errno == errno.EMFILE else "the machine's: sysctl fs.file-max"
        return f"too many open files; raise the limit ({advice})"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{failure.filename or 'the output'} can't be written: {failure.strerror}"
    return None


def named(name: str, text: str) -> FusecacheError:
    """An error that another process of ours told by its class's name; FusecacheError when the name is unknown."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, FusecacheError):
        return kind(text)
    return FusecacheError(text)
