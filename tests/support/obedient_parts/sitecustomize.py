"""Lets a test break a worker or the agent of a real mount. Python imports this in every process of it that has this
folder in PYTHONPATH; `FUSECACHE_TEST_ORDERS` names the folder where orders lie.

    worker        what the next LISTXATTR does to the worker that gets it: `loop`, or the name of an exception
    agent         the same, when somebody reads `.fusecache/config`
    worker dies   every worker ends with 3 as it starts, as long as the file is there; `tries` grows by a byte each time

An order that was carried out is renamed: `worker-PID`.
"""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any


def obey(folder: Path, part: str) -> None:
    """Carry out the part's order, if there is one; one process alone gets it."""
    obeyed = folder / f"{part}-{os.getpid()}"
    try:
        (folder / part).rename(obeyed)
    except FileNotFoundError:
        return
    order = obeyed.read_text()
    while order == "loop":
        pass
    raise getattr(builtins, order)("the test says so")


def prepare_worker(folder: Path) -> None:
    """LISTXATTR obeys."""
    if (folder / "worker dies").exists():
        with (folder / "tries").open("ab") as tries:
            tries.write(b"x")
        os._exit(3)

    from fusecache.fs.gated_operations import GatedOperations
    from fusecache.fs.guard import served

    original = GatedOperations.listxattr

    async def listxattr(self: Any, *arguments: Any) -> Any:
        obey(folder, "worker")
        return await original(self, *arguments)

    GatedOperations.listxattr = served(listxattr)


def prepare_agent(folder: Path) -> None:
    """A question for the configuration obeys."""
    from fusecache.daemon.mount_control import MountControl

    original = MountControl.describe_config

    def describe_config(self: Any) -> Any:
        obey(folder, "agent")
        return original(self)

    MountControl.describe_config = describe_config


PREPARATIONS = {"fusecache.daemon.worker": prepare_worker, "fusecache.daemon.agent": prepare_agent}

for argument in sys.orig_argv:
    if argument in PREPARATIONS and "FUSECACHE_TEST_ORDERS" in os.environ:
        PREPARATIONS[argument](Path(os.environ["FUSECACHE_TEST_ORDERS"]))
