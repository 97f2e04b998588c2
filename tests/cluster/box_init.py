"""Process 1 of a node's box: prepares the box's mounts, says so on standard output, then reaps what is left to it.

Runs alone, with nothing but the standard library, as the first process of new pid, mount, network, UTS and IPC
namespaces:

    box_init.py FOLDER

Everything a node writes to fixed places (/var/lib, /run, /var/log, /etc/hosts) lands below FOLDER. When this process
ends the kernel ends every other process of the box, and the box's mounts and network devices go with them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

OWN_FOLDERS = ("var/lib", "var/log", "run")
"""Empty at first, and the box's own: what this machine has there is not seen in the box."""

KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What a kubelet sets for the whole machine; here it sets a file of its own."""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def drop_fuse_mounts() -> None:
    """Let go of this machine's FUSE mounts, of which the namespace has copies: the kernel would keep their sessions,
    and so their daemons, for as long as the box stands."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("fuse"):
            # Nested ones may have gone with the one above.
            subprocess.run(["umount", "--lazy", before.split()[4]], check=False, stderr=subprocess.DEVNULL)


def main(folder: Path) -> None:
    drop_fuse_mounts()
    # Mounts made by a container (mountPropagation: Bidirectional) must come out on the node, as under systemd.
    mount("--make-rshared", "/")
    for name in OWN_FOLDERS:
        inside = folder / "host" / name
        inside.mkdir(parents=True)
        mount("--bind", inside, f"/{name}")
    hosts = folder / "host" / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    mount("--bind", hosts, "/etc/hosts")
    settings = folder / "host" / "sys"
    for name in KERNEL_SETTINGS:
        now = Path("/proc/sys") / name
        copy = settings / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(now.read_text())
        mount("--bind", copy, now)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    print("ready", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
