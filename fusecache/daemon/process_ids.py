"""Process ids that two containers hardly share. Linux only; changes nothing outside a PID namespace of one's own.

Old and new processes of a mount that is taken over open one metadata database at a time. LMDB locks it by process id,
so equal ids of two containers shut each other out (a lock error at the first read), and in containers all ids begin
at 1.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""The machine's own (PROC_PID_INIT_INO of include/linux/proc_ns.h)."""

LAST_PID: Final = Path("/proc/sys/kernel/ns_last_pid")
MOST: Final = Path("/proc/sys/kernel/pid_max")
LEAST_ID: Final = 300
"""The kernel's own first id after it has started from the beginning again (RESERVED_PIDS)."""


def spread() -> None:
    """Let the ids of later children begin anywhere. Where that is not allowed, it is said."""
    try:
        if os.readlink("/proc/self/ns/pid") != FIRST_NAMESPACE:
            LAST_PID.write_text(str(random.randrange(LEAST_ID, int(MOST.read_text()))))
    except OSError as failure:
        log.info("process ids begin at 1", why=failure.strerror)
