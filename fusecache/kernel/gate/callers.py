"""Who waits for an answer: is that thread being killed? Looks at /proc once; the gate's loop asks it seldom.

A thread that is being killed, by whatever fatal signal to whichever thread of its process, has SIGKILL pending until it
has left the kernel (complete_signal of kernel/signal.c), which it can't while it waits for a file system's answer.
"""

from __future__ import annotations

import signal

_KILLED = 1 << (signal.SIGKILL - 1)
_PENDING = (b"SigPnd:", b"ShdPnd:")


def is_being_killed(thread: int) -> bool:
    """Whether the thread is on its way out. False for one that can't be seen from here (another PID namespace)."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            fields = [line.split() for line in file if line.startswith(_PENDING)]
        return any(int(mask, 16) & _KILLED for _, mask in fields)
    except (OSError, ValueError):
        return False
