"""SOURCE arguments: `alluxio://m1:19998[,m2:19998]/path`, `CLUSTER:/path`, or a folder.

`parse_source` is pure: it tells the three forms apart and checks everything that the text alone can show.
`check_folder` looks at the folder itself and nothing else. Each error is one line that names the offending
value and says what to write instead. Bytes of a path are kept as given (`os.fsencode`), names need not be UTF-8.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from fusecache.errors import UsageError

DEFAULT_MASTER_PORT = 19998
"""alluxio.master.rpc.port."""

_FORMS = "write alluxio://HOST:19998/PATH, CLUSTER:/PATH (a cluster of the configuration file), or a folder"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):///*")
_CLUSTER = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62}):(/.*|)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")


class AlluxioSource(NamedTuple):
    """A URL: the masters are in it."""

    masters: tuple[str, ...]
    """host:port each."""
    path: bytes


class ClusterSource(NamedTuple):
    """A path in a cluster that the configuration file describes."""

    cluster: str
    path: bytes


class FolderSource(NamedTuple):
    """A folder of this machine, to be served by an embedded server."""

    folder: Path


Source = AlluxioSource | ClusterSource | FolderSource


def parse_source(text: str) -> Source:
    """Tell the three forms apart. UsageError names what is wrong in `text`."""
    if not text:
        raise UsageError(f"SOURCE is empty; {_FORMS}")
    if "\0" in text:
        raise UsageError(f"SOURCE {text!r} holds a NUL character; no path can")
    if _SCHEME.match(text):
        return _parse_url(text)
    if text.startswith(("/", ".", "~")):
        return FolderSource(_folder_path(text))
    if match := _CLUSTER.fullmatch(text):
        if not match[2]:
            raise UsageError(f"SOURCE {text!r} has no path; write {text}/ for the whole cluster")
        return ClusterSource(match[1], normal_path(match[2], text))
    return FolderSource(_folder_path(text))


def parse_host_port(text: str, default_port: int | None = DEFAULT_MASTER_PORT, lowest_port: int = 1) -> tuple[str, int]:
    """host and port of `host`, `host:port`, `[v6]:port`. ValueError says what is wrong.

    `default_port` None = the port must be there; `lowest_port` 0 allows "any free port" for listening.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not _IPV6.fullmatch(host) or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [IPv6 address]:port")
        port_text = rest[1:] if rest else None
    else:
        host, colon, after = text.partition(":")
        port_text = after if colon else None
        if not _HOST.fullmatch(host):
            raise ValueError(f"{text!r} has no valid host name; write HOST:PORT")
    if port_text is None:
        if default_port is None:
            raise ValueError(f"{text!r} has no port; write HOST:PORT")
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or not lowest_port <= int(port_text) <= 65535:
        raise ValueError(f"{port_text!r} in {text!r} is not a port; allowed: {lowest_port} to 65535")
    return host, int(port_text)


def normal_path(text: str, whole: str) -> bytes:
    """Absolute Alluxio path without empty components and without a trailing slash. UsageError for `.` and `..`."""
    parts = [part for part in os.fsencode(text).split(b"/") if part]
    for part in parts:
        if part in (b".", b".."):
            raise UsageError(f"the path in {whole!r} holds {os.fsdecode(part)!r}; write it without")
    return b"/" + b"/".join(parts)


def folder_here(relative: str | Path) -> str:
    """The folder that this process is in, where the name `relative` begins. UsageError when it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            f"{str(relative)!r} is relative, and the folder that the command is in was removed; give an absolute path"
        ) from None


def absolute(path: str | Path) -> str:
    """As os.path.abspath. UsageError when `path` is relative and the folder that this process is in was removed."""
    return os.path.normpath(path if os.path.isabs(path) else os.path.join(folder_here(path), path))


def check_folder(folder: Path, name: str = "SOURCE") -> None:
    """Check that a folder can be served. UsageError names it, the argument `name`: missing, a file, unreadable."""
    try:
        mode = folder.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise UsageError(f"{name} {str(folder)!r} is not a folder; give the folder that holds it")
        os.scandir(folder).close()
    except FileNotFoundError:
        raise UsageError(
            f"{name} {str(folder)!r} does not exist; give a folder that does"
            + (", or alluxio://HOST:19998/PATH" if name == "SOURCE" else "")
        ) from None
    except PermissionError:
        raise UsageError(
            f"{name} {str(folder)!r} is not readable; allow this user to read it, or run as its owner"
        ) from None
    except OSError as failure:
        raise UsageError(f"{name} {str(folder)!r} can't be used: {failure.strerror}") from None
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"{name} {str(folder)!r} is not readable; allow this user to read it, or run as its owner")


def _parse_url(text: str) -> AlluxioSource:
    scheme, _, rest = text.partition("://")
    if scheme.lower() != "alluxio":
        raise UsageError(f"SOURCE {text!r} has the scheme {scheme!r}, only alluxio:// is known; {_FORMS}")
    authority, slash, path = rest.partition("/")
    if not authority:
        raise UsageError(f"SOURCE {text!r} names no master; write alluxio://HOST:{DEFAULT_MASTER_PORT}/PATH")
    if "@" in authority:
        raise UsageError(
            f"SOURCE {text!r} has {authority.partition('@')[0] + '@'!r} before the masters; "
            "list the masters themselves (HOST:PORT,HOST:PORT) and give a user with --user"
        )
    masters: list[str] = []
    for part in re.split(r"[,;+]", authority):
        if not part:
            raise UsageError(f"SOURCE {text!r} has an empty master; separate HOST:PORT by single commas")
        try:
            host, port = parse_host_port(part)
        except ValueError as failure:
            raise UsageError(f"SOURCE {text!r}: {failure}") from None
        masters.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if not slash:
        raise UsageError(f"SOURCE {text!r} has no path; write {text}/ for the whole cluster")
    return AlluxioSource(tuple(masters), normal_path("/" + path, text))


def _folder_path(text: str) -> Path:
    return Path(absolute(os.path.expanduser(text)))
