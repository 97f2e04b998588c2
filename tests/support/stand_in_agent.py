"""An agent that knows no cluster: says `prepared`, waits for `serving`, tells the ready pipe, notes what it hears.

What it is told lies in the folder FUSECACHE_STAND_IN as `agent-serving.json` and `agent-status.json` (asked for when
the file `ask` appears there). `invalidate` makes it push an invalidation of the file `slow`; `invalidated` says that
the push has returned. `flood` makes it say without end that it is prepared, and more, and hear nothing; `flooded` says
that it was more than may wait. A file `agent fails` makes it fail with the exit code and the text that it holds. `hang`
makes it loop for ever. For as long as `agent waits` is there it does not get ready; `cluster` holds the id of the
cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fusecache.kernel.channel import MAX_WAITING
from fusecache.kernel.gate_link import GateLink
from tests.support.stand_in_worker import NAMES

ASK_POLL_MS = 20


def write_whole(path: Path, content: Any) -> None:
    """So that a reader finds all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(path)


def main() -> int:
    """Flags as the supervisor gives them."""
    parser = argparse.ArgumentParser()
    for flag in ("plan-fd", "epoch-fd", "gate-fd", "control-fd"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--agent-socket", required=True)
    flags = parser.parse_args()
    folder = Path(os.environ["FUSECACHE_STAND_IN"])
    assert os.pread(flags.plan_fd, 4, 0) == b"plan"
    faulthandler.enable()
    control = socket.socket(fileno=flags.control_fd)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def say(**message: Any) -> None:
        control.send(json.dumps(message).encode())

    link = GateLink(flags.gate_fd)

    def invalidate() -> None:
        """Blocks for as long as the file is being read."""
        with contextlib.suppress(OSError):
            link.invalidate_inode(NAMES[b"slow"])
        (folder / "invalidated").touch()

    if (order := folder / "agent fails").exists():
        code, _, text = order.read_text().partition(" ")
        say(kind="failed", exit_code=int(code), text=text)
        return int(code)
    while (folder / "agent waits").exists():
        time.sleep(ASK_POLL_MS / 1000)
    cluster = folder / "cluster"
    say(
        kind="prepared",
        open_mode=os.environ.get("FUSECACHE_STAND_IN_MODE", "no-open"),
        why="the test says so",
        cluster_id=cluster.read_text() if cluster.exists() else "",
    )
    while True:
        if not select.select([control], [], [], ASK_POLL_MS / 1000)[0]:
            if (folder / "ask").exists():
                (folder / "ask").unlink()
                say(kind="status")
            if (folder / "hang").exists():
                while True:
                    pass
            if (folder / "flood").exists():
                said = 0
                while True:
                    say(kind="prepared", open_mode="no-open", why="again")
                    say(kind="stop")
                    said += 1
                    if said == 10 * MAX_WAITING:
                        (folder / "flooded").touch()
            if (folder / "invalidate").exists():
                (folder / "invalidate").unlink()
                threading.Thread(target=invalidate, daemon=True).start()
            continue
        data = control.recv(1 << 16)
        if not data:
            return 1
        message = json.loads(data)
        if message["kind"] == "ping":
            say(kind="pong")
            continue
        if message["kind"] == "status":
            write_whole(folder / "agent-status.json", message)
            continue
        assert message["kind"] == "serving", message
        write_whole(folder / "agent-serving.json", {**message, "pid": os.getpid()})
        if flags.ready_fd is not None:
            subprocess.run(["stat", message["mountpoint"]], check=True, stdout=subprocess.DEVNULL, timeout=10)
            with contextlib.suppress(BrokenPipeError):  # the test does not wait for it
                os.write(flags.ready_fd, b"ready\n")
            os.close(flags.ready_fd)
            flags.ready_fd = None
        say(kind="ready")


if __name__ == "__main__":
    sys.exit(main())
