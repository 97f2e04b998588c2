"""A process whose master gets its name late; run by test_f06_master_name_unknown in a mount namespace of its own.

    unshare --mount python -m tests.faults.late_name FOLDER

Its /etc/hosts is a file of FOLDER, so that the name can begin to resolve while the client lives. Prints a JSON object:
what the client said while the name was unknown, and how many seconds after the name appeared it was connected.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from time import monotonic

from fusecache.alluxio.client import AlluxioClient
from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.errors import Unavailable
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from tests.support.embedded import embedded_server

NAME = "late-master.invalid"


def main(folder: Path) -> None:
    """Fail to connect, give the name an address, connect."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    (folder / "source").mkdir()
    clock = SystemClock()
    with embedded_server(folder / "source", folder / "server") as server:
        port = server.master_target.rpartition(":")[2]
        client = AlluxioClient(
            ClusterConfig(name="c", masters=(f"{NAME}:{port}",)),
            Settings(connect_s=1.0, rpc_try_s=1.0),
            metrics=Metrics(),
            clock=clock,
            rng=random.Random(1),
        )
        said = ""
        try:
            client.connect(Budget(clock, 3.0))
        except Unavailable as error:
            said = str(error)
        with hosts.open("a") as file:
            file.write(f"127.0.0.1 {NAME}\n")
        begin = monotonic()
        client.connect(Budget(clock, 60.0))
        print(json.dumps({"said_while_unknown": said, "back_after_s": monotonic() - begin}))
        client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
