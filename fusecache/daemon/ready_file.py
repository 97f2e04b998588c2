"""A file that is there while `serve` serves reads: for probes of a container that shares its address with another one.

During an update two pods of a node have one network, and /readyz is answered by whichever still has the mounts. A file
in a folder of the container's own can't be mistaken for the other's.

Decides nothing: `serve` says when.
"""

from __future__ import annotations

from pathlib import Path

from fusecache.errors import UsageError


class ReadyFile:
    """One file, or none."""

    def __init__(self, path: Path | None) -> None:
        """Removes what a process before has left. UsageError when it can't be made or removed later."""
        self._path = path
        if path is not None:
            try:
                path.unlink(missing_ok=True)
                path.touch()
                path.unlink()
            except OSError as error:
                raise UsageError(f"ready file {str(path)!r} can't be made: {error.strerror}") from None

    def make(self) -> None:
        """All mounts serve reads."""
        if self._path is not None:
            self._path.touch()

    def remove(self) -> None:
        """Not all of them do (any more). Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
