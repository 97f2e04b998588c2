"""How serving ends: unmounted in whatever way the kernel says so, and not hiding anything else."""

from __future__ import annotations

import errno
from pathlib import Path

import pyfuse3
import pytest

from fusecache.fs import request_wait
from fusecache.fs.session import Session


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Not mounted, and this process waits for requests as it always did."""
    monkeypatch.setattr(request_wait, "install", lambda spin_s: None)
    return Session(pyfuse3.Operations(), Path("/nowhere"), spin_us=0)


async def test_session_that_is_unmounted_while_it_takes_a_request_just_ends(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a file was closed and its mount unmounted at once; taking the RELEASE was ECONNABORTED, not ENODEV."""

    async def main(**bounds: int) -> None:
        raise ExceptionGroup("tasks", [ConnectionAbortedError(errno.ECONNABORTED, "receive")])

    monkeypatch.setattr(pyfuse3, "main", main)
    await session.serve()


async def test_session_tells_of_every_other_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(**bounds: int) -> None:
        raise ExceptionGroup("tasks", [OSError(errno.EIO, "receive")])

    monkeypatch.setattr(pyfuse3, "main", main)
    with pytest.raises(ExceptionGroup):
        await session.serve()
