"""A cluster by hand: `python -m tests.cluster up [--scheduler-only] --dir FOLDER`, ended by Ctrl-C or SIGTERM.

Prints the path of an administrator's kubeconfig when everything is ready. FOLDER must not exist and is removed at the
end.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from tests.cluster.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--dir", required=True, type=Path, help="everything lies here; must not exist")
    parser.add_argument("--scheduler-only", action="store_true", help="no real node")
    parser.add_argument("--nodes", type=int, default=50, help="simulated nodes (default 50)")
    arguments = parser.parse_args()
    folder = arguments.dir.absolute()
    if folder.exists():
        parser.error(f"{folder} exists")
    ends = {signal.SIGINT, signal.SIGTERM}
    # Raises in the middle of a start too, so that a half-started cluster is taken down as a whole one is.
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        with World(folder, real_node=not arguments.scheduler_only, simulated=arguments.nodes) as world:
            print(f"KUBECONFIG={world.kubeconfig}", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
