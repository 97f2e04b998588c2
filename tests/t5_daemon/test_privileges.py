"""`run_as_user` under the real supervisor and gate: who the parts are, what they may do, what they are connected to.

What is asserted is what the kernel says of the processes (/proc), not what they were told.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.errors import UsageError
from fusecache.kernel import probe
from fusecache.kernel.privileges import OF_THE_GATE, Identity, check_can_give_up
from tests.support import stand_in_worker
from tests.support.mounting import needs_fuse
from tests.support.reachable import STRANGER, as_user, needs_root
from tests.support.supervised import Supervised, runs, until

USER, GROUP = 64_001, 64_002
ZERO = "0000000000000000"
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
EXPOSED = ("agent", "worker 0", "worker 1")

NOTE_RIGHTS = 'cat /proc/$$/status >"$0.$$"; exec "$@"'
"""A part's first program: notes what it was started with, then becomes the part."""

pytestmark = [needs_fuse, needs_root]


def rights(status: str) -> dict[str, str]:
    """The lines of /proc/PID/status by name."""
    return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)


def of_process(pid: int) -> dict[str, str]:
    return rights(Path(f"/proc/{pid}/status").read_text())


def without_rights(found: dict[str, str]) -> None:
    """Another user, in one group, with nothing and no way to anything."""
    assert found["Uid"].split() == [str(USER)] * 4
    assert found["Gid"].split() == [str(GROUP)] * 4
    assert found["Groups"].split() == []
    assert {found[name] for name in SETS} == {ZERO}
    assert found["NoNewPrivs"] == "1"


def sockets_of(pid: int) -> set[str]:
    """Numbers of the sockets that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    links = [os.readlink(folder / number) for number in os.listdir(folder)]
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def unix_sockets(pid: int) -> set[str]:
    """Numbers of all unix sockets of the process's network name space."""
    return {line.split()[6] for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]}


@pytest.fixture
def mount(reachable: Path, python_for_all: str) -> Iterator[Supervised]:
    features = probe.probe()
    if not features.usable("mount"):
        pytest.skip(features["mount"].why)
    noted, python = reachable / "noted", (python_for_all, "-S", "-m")
    noted.mkdir(mode=0o777)
    noted.chmod(0o777)
    with Supervised(
        reachable,
        features,
        run_as_user=USER,
        run_as_group=GROUP,
        worker_argv=("/bin/sh", "-c", NOTE_RIGHTS, str(noted / "worker"), *python, "tests.support.stand_in_worker"),
        agent_argv=("/bin/sh", "-c", NOTE_RIGHTS, str(noted / "agent"), *python, "tests.support.stand_in_agent"),
    ) as made:
        made.orders.chmod(0o777)
        made.start()
        assert made.report == b"ready\n"
        yield made


def test_workers_and_agent_have_no_rights_when_their_programs_start(mount: Supervised) -> None:
    """S38: noted by the first program of each, before a line of ours runs; and still so when they serve."""
    assert (mount.mountpoint / "file").read_bytes() == stand_in_worker.CONTENT
    noted = sorted((mount.folder / "noted").iterdir())
    assert [path.stem for path in noted] == ["agent", "worker", "worker"]
    for path in noted:
        without_rights(rights(path.read_text()))
    parts = mount.parts()
    for name in EXPOSED:
        without_rights(of_process(parts[name]["pid"]))


def test_a_worker_that_is_started_again_has_no_rights_either(
    mount: Supervised, expected_logs: Callable[..., None]
) -> None:
    """S38."""
    expected_logs("a worker ended", count=1)
    pid = mount.parts()["worker 0"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: mount.parts()["worker 0"]["pid"] not in (pid, None), "another worker")
    without_rights(of_process(mount.parts()["worker 0"]["pid"]))


def test_the_gate_has_two_capabilities(mount: Supervised) -> None:
    """S38; and so has the one that stands by for it."""
    until(lambda: mount.parts()["spare gate"]["ready"], "a spare gate stands by")
    for name in ("gate", "spare gate"):
        part = mount.parts()[name]
        assert sorted(part["rights"]["capabilities"]) == sorted(OF_THE_GATE)
        found = of_process(part["pid"])
        assert int(found["CapEff"], 16) == int(found["CapPrm"], 16) == int(found["CapBnd"], 16) == 1 << 21 | 1 << 2
        assert found["NoNewPrivs"] == "1"


def test_supervisor_and_gate_have_no_network(mount: Supervised) -> None:
    """S38: unix sockets only, and the gate's network name space leads nowhere."""
    parts = mount.parts()
    known = unix_sockets(parts["supervisor"]["pid"])  # where the gate's were made too
    for name in ("supervisor", "gate"):
        sockets = sockets_of(parts[name]["pid"])
        assert sockets, "it has sockets, or the test looks at the wrong process"
        assert sockets <= known
    gate, supervisor = (Path(f"/proc/{parts[name]['pid']}") for name in ("gate", "supervisor"))
    assert os.readlink(gate / "ns" / "net") != os.readlink(supervisor / "ns" / "net")
    assert len((gate / "net" / "route").read_text().splitlines()) <= 1, "a head line at most"


def test_status_tells_who_the_parts_are(mount: Supervised) -> None:
    parts = mount.parts()
    for name in EXPOSED:
        assert parts[name]["rights"] == {"uid": USER, "gid": GROUP, "capabilities": [], "no_new_privileges": True}
    assert parts["supervisor"]["rights"]["uid"] == parts["gate"]["rights"]["uid"] == 0
    assert "sys_admin" in parts["supervisor"]["rights"]["capabilities"]


def test_they_end_with_the_supervisor(mount: Supervised) -> None:
    """S36: the signal at the parent's death is asked for after the change of user, which would clear it."""
    until(lambda: all(part["pid"] for part in mount.parts().values()), "all parts run")
    pids = [part["pid"] for name, part in mount.parts().items() if name != "supervisor"]
    assert len(pids) == 5
    os.kill(mount.pid, signal.SIGKILL)
    mount.ended()
    until(lambda: not any(map(runs, pids)), "all parts have ended", within_s=2.0)


def test_a_setuid_program_gives_nothing_back(reachable: Path) -> None:
    """S38."""
    program = reachable / "setuid-id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    assert as_user(STRANGER, [program, "-u"]).stdout == "0\n", "it is a setuid program, or the test shows nothing"
    script = (
        "import subprocess, sys\n"
        "from fusecache.kernel.privileges import Identity, give_up\n"
        f"give_up(Identity({USER}, {GROUP}))\n"
        "subprocess.run([sys.argv[1], '-u'], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(program)], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == f"{USER}\n"


@pytest.mark.parametrize("missing", ["setuid", "setgid", "setpcap", "kill"])
def test_a_supervisor_that_lacks_a_capability_for_it_is_told_which(missing: str) -> None:
    script = (
        "from fusecache.errors import UsageError\n"
        "from fusecache.kernel.privileges import Identity, check_can_give_up\n"
        "try: check_can_give_up(Identity(5, 5))\n"
        "except UsageError as failure: print(failure)\n"
    )
    done = subprocess.run(
        ["setpriv", "--bounding-set", f"-{missing}", "--", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert f"run_as_user 5: this process lacks CAP_{missing.upper()}; allow it" in done.stdout


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UsageError, match="run_as_user 5: only root can run workers as another user, and this is uid 1000"
    ):
        check_can_give_up(Identity(5, 5))
