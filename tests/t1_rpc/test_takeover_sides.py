"""What the two sides of a take-over do with their line, their clock and their gates, without a mount."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fusecache.errors import MountError
from fusecache.kernel.channel import Channel, socket_pair
from fusecache.kernel.features import FEATURE_NAMES, Observation, judge
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor import keeping
from fusecache.kernel.supervisor.gates import Gates
from fusecache.kernel.supervisor.keeping import Keeper
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.restart_policy import RestartPolicy
from fusecache.kernel.supervisor.roles import Agent, Gate
from fusecache.kernel.supervisor.takeover.facts import Descriptors, Facts
from fusecache.kernel.supervisor.takeover.line import Line, close_all
from fusecache.kernel.supervisor.takeover.new_side import Given, TakingOver
from fusecache.kernel.supervisor.takeover.old_side import HandingOver
from fusecache.kernel.supervisor.takeover.token import new_token, take_token
from fusecache.kernel.supervisor.timers import Timers
from fusecache.kernel.supervisor.workers import Workers

NONE: Any = None
LOG = Log("test", "error")
FACTS = Facts(
    version="1", device="0:57", open_mode="no-open", allow_other=True, max_read_bytes=4096, init="", init_plan={},
    cluster_id="c",
)  # fmt: skip
SPEC = MountSpec(
    mountpoint="/mnt", fsname="source", allow_other=True, open_mode="no-open", workers=1, plan_fd=0,
    features=judge({name: Observation(True, "seen") for name in FEATURE_NAMES}, ()),
    gate_argv=("gate",), worker_argv=("worker",), agent_argv=("agent",), agent_socket="", control_socket="",
)  # fmt: skip


def new_side(token: int) -> tuple[TakingOver, Line]:
    """A new side that prepares itself, and the old side's end of the line."""
    old_end, new_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = Descriptors(session=-1, gate_device=-1, open_table=-1, token=token)
    given = Given(FACTS, descriptors, new_end.detach())
    return TakingOver(given, NONE, NONE, lambda: pytest.fail("it does not serve yet"), Timers(), LOG), Line(old_end)


def test_an_old_side_that_is_gone_is_not_listened_to_any_more() -> None:
    """Its end of the line would wake the loop up for ever."""
    taking, line = new_side(new_token())
    line.close()
    (step,) = taking.sources().values()
    step()
    assert taking.sources() == {}


def test_an_old_side_that_has_taken_the_mount_back_and_is_gone_ends_the_new_one() -> None:
    token = new_token()
    taking, line = new_side(token)
    assert take_token(token)
    line.close()
    (step,) = taking.sources().values()
    with pytest.raises(MountError, match="took it back"):
        step()
    assert taking.sources() == {}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Of a part, as far as anybody sees."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_the_old_side_stops_an_agent_that_runs_and_one_that_was_about_to_be_started_again(
    process: subprocess.Popen[bytes],
) -> None:
    timers = Timers()
    running, ended = Part("embedded server", RestartPolicy()), Part("agent", RestartPolicy())
    timers.after(ended.name, 0, lambda: pytest.fail("it is started while another process has the mount"))
    running.pid = process.pid
    handing = HandingOver(SPEC, NONE, (running, ended), {}, Keeper(timers, LOG), timers, LOG)
    handing.happens("hello")
    timers.run()
    assert process.wait(10) == -signal.SIGTERM
    assert handing.course.state == "yielding", "until the end of the one that runs was seen"


def test_what_a_gate_gave_up_waits_for_the_next_one_that_can_be_started(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, expected_logs: Callable[..., None]
) -> None:
    """Without it that gate would wait for the word to read for ever, and so would everybody who reads."""
    expected_logs("gate can't be started yet", count=1)
    monkeypatch.setattr(keeping, "AGAIN_S", 0.0)
    timers, gate = Timers(), Gate()
    keeper = Keeper(timers, LOG)
    keeper.patient = True
    table_fd, carried_fd = os.memfd_create("table"), os.memfd_create("carried")
    workers = Workers(SPEC, gate, keeper, timers, LOG, epoch_fd=-1, environment={})
    gates = Gates(SPEC, gate, Agent(), workers, keeper, timers, LOG, table_fd=table_fd, environment={})
    session: Any = SimpleNamespace(open_mode="no-open", gate_device=table_fd, gate_settings=dict)
    ours, theirs = socket_pair()
    theirs.settimeout(10)
    starts = iter((True, False, True))

    def launch(*_: object) -> None:
        if not next(starts):
            raise OSError(errno.EAGAIN, "none left")
        gate.channel = gate.channel or Channel(ours)
        gate.started(process.pid)

    monkeypatch.setattr(gate, "launch", launch)
    with theirs:
        gates.start(session)
        gate.ended()
        gates.refill(carried_fd)
        timers.run()
        said = []
        for _ in range(5):
            message, descriptors, *_ = socket.recv_fds(theirs, 1 << 16, 4)
            close_all(descriptors)
            said.append(json.loads(message)["kind"])
    gate.close()
    assert said == ["begin", "status", "begin", "status", "go"]
    os.close(table_fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(carried_fd)
