"""Who has a mount in the middle of a take-over: an eventfd that both sides hold, and whose one count is read once.

When it is taken, and what follows, `states` says.
"""

from __future__ import annotations

import os


def new_token() -> int:
    """Can be taken once (`take_token`), by whoever holds a copy of the descriptor. Not inherited."""
    return os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def take_token(token: int) -> bool:
    """Whether it was still there; from now on it is not."""
    try:
        os.eventfd_read(token)
    except BlockingIOError:
        return False
    return True
