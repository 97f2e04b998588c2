"""A cluster by hand, ended by Ctrl-C or SIGTERM.

    python -m tests.cluster build                          what is built once and kept outside the checkout (minutes)
    python -m tests.cluster up --dir FOLDER                a whole node, and simulated ones
    python -m tests.cluster up --dir FOLDER --fusecache    ... with the manifests of deploy/ applied and data mounted
    python -m tests.cluster up --dir FOLDER --scheduler-only

`up` prints the path of an administrator's kubeconfig when everything is ready. FOLDER must not exist and is removed at
the end.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from tests.cluster import binaries, image
from tests.cluster.stories import install
from tests.cluster.world import World


def main() -> None:
    arguments = parsed()
    if arguments.command == "build":
        print(binaries.folder())
        print(image.root_file_system())
        return
    ends = {signal.SIGINT, signal.SIGTERM}
    # Raises in the middle of a start too, so that a half-started cluster is taken down as a whole one is.
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        with World(arguments.dir, real_node=not arguments.scheduler_only, simulated=arguments.nodes) as world:
            if arguments.fusecache:
                installed = install(world).installation
                print(f"controller {installed.controller_address}, data {installed.served}")
            print(f"KUBECONFIG={world.kubeconfig}", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    except KeyboardInterrupt:
        pass


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build Kubernetes and the image's root file system, once")
    up = commands.add_parser("up", help="start a cluster")
    up.add_argument("--dir", required=True, type=lambda text: Path(text).absolute(), help="must not exist")
    up.add_argument("--nodes", type=int, default=50, help="simulated nodes (default 50)")
    which = up.add_mutually_exclusive_group()
    which.add_argument("--scheduler-only", action="store_true", help="no real node")
    which.add_argument("--fusecache", action="store_true", help="apply deploy/ and serve some random files")
    arguments = parser.parse_args()
    if arguments.command == "up" and arguments.dir.exists():
        parser.error(f"{arguments.dir} exists")
    return arguments


if __name__ == "__main__":
    main()
