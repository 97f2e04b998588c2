"""The box a node lives in: its own pid, mount, network, UTS and IPC namespaces on this machine.

A node in a box has the usual ports and paths for itself and can leave nothing behind: when the box's first process
ends, the kernel ends every process in it, and its mounts and network devices vanish. It ends with the process that
made it, even when that one is killed. What the kernel does not take away is written down before it is made (folder,
cgroup, network link), and `clean_up_after_the_dead` takes away exactly that for runs whose owner no longer lives.

    this machine                                  the box
    fusecache<N>  10.213.N.1  ---- veth pair ---- 10.213.N.2  eth0        nodes and programs
                  route 10.214.N.0/24 via 10.213.N.2                      Services
                                                  10.215.N.0/24           pods
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.cluster import box_init
from tests.cluster.remains import clean_up_after_the_dead, identity, records, remove_remains

BOXES = 64
"""Most boxes on one machine at a time."""

STOP_S = 10.0
NAMESPACES = ("--pid", "--mount", "--net", "--uts", "--ipc")


class Program:
    """A program that runs in the box, and its log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._entered = process
        """The process that entered the box; it waits for the program and ends as it did."""

    @property
    def pid(self) -> int:
        """The program's pid as this machine sees it; 0 while it is not there."""
        number = self._entered.pid
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def check(self) -> None:
        """RuntimeError with the end of the log when it is gone."""
        if self._entered.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self._entered.returncode}:\n{self.tail()}")

    def tail(self, size_bytes: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size_bytes:]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; always waits."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if pid := self.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)
            try:
                self._entered.wait(timeout=STOP_S)
                return
            except subprocess.TimeoutExpired:
                continue
        self._entered.kill()
        self._entered.wait()


class Box:
    """The namespaces; the attributes below are valid inside the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        self._programs: list[Program] = []

    @property
    def address(self) -> str:
        """The box's own address, reachable from this machine."""
        return f"10.213.{self.number}.2"

    @property
    def gateway(self) -> str:
        """This machine's address as the box sees it."""
        return f"10.213.{self.number}.1"

    @property
    def service_network(self) -> str:
        """Addresses of Services; this machine reaches them through the box."""
        return f"10.214.{self.number}.0/24"

    @property
    def pod_network(self) -> str:
        """Addresses of pods that are not on the node's own network."""
        return f"10.215.{self.number}.0/24"

    @property
    def cgroup(self) -> str:
        """The control group that everything the kubelet starts lies in."""
        return f"/fusecache-box-{self.number}"

    def __enter__(self) -> Box:
        check_machine()
        clean_up_after_the_dead()
        if self.folder.exists():
            raise RuntimeError(f"{self.folder} exists; a box's folder is made and removed with it")
        for needed in (self.folder, Path(__file__), Path(sys.executable), records()):
            if any(needed.absolute().is_relative_to(f"/{own}") for own in box_init.OWN_FOLDERS):
                raise RuntimeError(
                    f"{needed} would not be seen in the box, which has a /var/lib, /var/log and /run of its own"
                )
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in reversed(self._programs):
            program.stop()
        if self._process is not None:
            if self._init_pid:
                with suppress(ProcessLookupError):
                    os.kill(self._init_pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        if self.number >= 0:
            remove_remains(self._record_path)

    @property
    def _record_path(self) -> Path:
        return records() / f"{self.number}.json"

    def _start(self) -> None:
        self._claim_number()
        self.folder.mkdir(parents=True)
        log = (self.folder / "box.log").open("wb")
        # pdeathsig: the box ends with this process, whatever ends it.
        with log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--fork", "--kill-child=KILL", "--mount-proc", *NAMESPACES),
                    *(sys.executable, box_init.__file__, str(self.folder)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C at a terminal is for the one who made the box; it ends the box in order.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if said.readline() != b"ready\n":
                self._process.wait()
                raise RuntimeError(f"the box did not start:\n{(self.folder / 'box.log').read_text(errors='replace')}")
        number = self._process.pid
        self._init_pid = int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])
        self._write_record()
        self._connect()

    def _claim_number(self) -> None:
        for number in range(BOXES):
            self.number = number
            try:
                self._write_record(os.link)
            except FileExistsError:
                continue
            return
        self.number = -1
        raise RuntimeError(f"{BOXES} boxes exist already: {records()}")

    def _write_record(self, publish: Callable[[Path, Path], None] = os.replace) -> None:
        record = {
            "owner": identity(os.getpid()),
            "init": identity(self._init_pid) if self._init_pid else None,
            "folder": str(self.folder),
            "cgroup": self.cgroup,
            "link": self._link,
        }
        # Whole from the first moment on: whoever reads it may be cleaning up.
        fresh = records() / f".{os.getpid()}"
        fresh.write_text(json.dumps(record))
        try:
            publish(fresh, self._record_path)
        finally:
            fresh.unlink(missing_ok=True)

    @property
    def _link(self) -> str:
        return f"fusecache{self.number}"

    def _connect(self) -> None:
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self._init_pid))
        _ip("address", "add", f"{self.gateway}/24", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("route", "add", self.service_network, "via", self.address)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", self.gateway)

    def enter(self) -> list[str]:
        """The command that runs another one in the box."""
        return ["nsenter", f"--target={self._init_pid}", *NAMESPACES, "--"]

    def run(
        self, *command: str | Path, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the box to its end. RuntimeError with what it said when it fails and `check`."""
        done = subprocess.run(
            [*self.enter(), *map(str, command)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def start(self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None) -> Program:
        """Start a program in the box; it is stopped with the box."""
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            process = subprocess.Popen(
                [*self.enter(), *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )
        program = Program(name, process, path)
        self._programs.append(program)
        return program

    def processes(self) -> dict[int, str]:
        """Pid (as this machine sees it) and command line of everything that runs in the box, in its containers too."""
        own = os.readlink(f"/proc/{self._init_pid}/ns/pid")
        children: dict[int, list[int]] = {}
        lines: dict[int, str] = {}
        waiting = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                pid = int(entry.name)
                with suppress(OSError):  # it has ended, or is none of ours to look at
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    children.setdefault(parent, []).append(pid)
                    lines[pid] = line.decode(errors="replace").strip()
                    if os.readlink(entry / "ns" / "pid") == own:
                        waiting.append(pid)
        # Containers have pid namespaces of their own, but the process that made one is the box's.
        found = {}
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found[pid] = lines[pid]
                waiting += children.get(pid, [])
        return found


def check_machine() -> None:
    """RuntimeError in words when no box can be made on this machine."""
    if os.getuid() != 0:
        raise RuntimeError("a node needs root: namespaces, mounts and control groups")
    missing = [name for name in ("unshare", "nsenter", "setpriv", "ip", "mount") if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not installed (.ci/prepare cluster)")
    tried = subprocess.run(
        ["unshare", "--fork", "--mount-proc", *NAMESPACES, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        raise RuntimeError(f"this machine lets nobody make namespaces, which a node needs: {tried.stderr.strip()}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
