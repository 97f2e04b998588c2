"""Work in a thread of trio's, on a machine (or in a pod, `podPidsLimit`) that may have no thread left.

A new thread is refused with RuntimeError, which is a bug's exception everywhere else: it would end a background task,
and with it the process. Here it is what it is, a shortage: the work waits for a thread for a while, and then it is
`Unavailable` like everything that could not be done in time. So a request is EIO at worst, and no task ends.

Limits nothing by itself: the callers' limiters do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import structlog
import trio

from fusecache.errors import Unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")

PATIENCE_S = 5.0
"""For a thread. Others end all the time: trio's own after 10 s without work, an application's whenever it likes."""

PAUSE_S = 0.05

NO_THREAD = "no thread can be started: a limit of this user, pod or machine"
"""For people."""


async def in_thread(
    work: Callable[..., T],
    *arguments: object,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """`work(*arguments)` in a thread, as trio.to_thread.run_sync has it. Unavailable when there is no thread for it
    within PATIENCE_S, or for what it starts itself."""
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        return work(*arguments)

    until_s = trio.current_time() + PATIENCE_S
    while True:
        try:
            return await trio.to_thread.run_sync(run, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        except RuntimeError as refusal:
            if not is_refused(refusal):
                raise
            if begun or trio.current_time() >= until_s:
                log.warning("no thread can be started", work=getattr(work, "__qualname__", str(work)))
                raise Unavailable(NO_THREAD) from None
        await trio.sleep(PAUSE_S)


def start_if_possible(thread: threading.Thread) -> None:
    """Start a thread for something that may be left out. Any thread."""
    try:
        thread.start()
    except RuntimeError as refusal:
        if not is_refused(refusal):
            raise
        log.warning("no thread can be started", work=thread.name)


def is_refused(failure: RuntimeError) -> bool:
    """Whether this is Python's word for a thread that the system does not give (pthread_create: EAGAIN)."""
    return "can't start new thread" in str(failure)
