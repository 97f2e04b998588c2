"""What the two sides of a take-over do with their line and their clock. Without a mount: gates and workers are none."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest

from fusecache.errors import MountError
from fusecache.kernel.features import FEATURE_NAMES, Observation, judge
from fusecache.kernel.keeping import Keeper
from fusecache.kernel.log import Log
from fusecache.kernel.parts import Part
from fusecache.kernel.restart_policy import RestartPolicy
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.takeover.facts import Descriptors, Facts
from fusecache.kernel.takeover.line import Line
from fusecache.kernel.takeover.new_side import Given, TakingOver
from fusecache.kernel.takeover.old_side import HandingOver
from fusecache.kernel.takeover.token import new_token, take_token
from fusecache.kernel.timers import Timers

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


def test_the_old_side_stops_an_agent_that_runs_and_one_that_was_about_to_be_started_again() -> None:
    timers = Timers()
    running, ended = Part("embedded server", RestartPolicy()), Part("agent", RestartPolicy())
    timers.after(ended.name, 0, lambda: pytest.fail("it is started while another process has the mount"))
    with subprocess.Popen(["sleep", "600"]) as process:
        running.pid = process.pid
        handing = HandingOver(SPEC, NONE, (running, ended), {}, Keeper(timers, LOG), timers, LOG)
        handing.happens("hello")
    timers.run()
    assert handing.course.state == "yielding", "until the one that runs has ended"
