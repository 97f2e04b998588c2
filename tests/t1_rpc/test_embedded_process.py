"""The embedded server as a process: what it says when it is ready, and when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from fusecache.pb.alluxio.block_master_pb2 import GetWorkerInfoListPOptions
from tests.support.embedded import WireClient, read_request, wait_until

ENDS_S = 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "file").write_bytes(b"data")
    return folder


def command(source: Path, state: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "fusecache", "embedded", str(source), "--port", "0", "--state-dir", str(state), *more]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes put here are ended, waited for, and their pipes closed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def start(processes: list[subprocess.Popen[bytes]], arguments: list[str], **more: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)
    processes.append(process)
    return process


def ready(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(output(process).readline())
    return answer


def output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def test_child_says_where_it_serves_and_ends_with_its_standard_input(
    processes: list[subprocess.Popen[bytes]], source: Path, tmp_path: Path
) -> None:
    process = start(processes, command(source, tmp_path / "state", "--child", "--block-workers", "2"))
    address = ready(process)
    with WireClient(address["master"]) as client:
        assert client.stat(b"/file").length == 4
    assert len(address["tier_folders"]) == 2
    assert all((Path(tier) / "alluxioworker").is_dir() for tier in address["tier_folders"])
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(ENDS_S) == 0
    assert output(process).read() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_alone_ends_at_a_signal_and_not_with_its_standard_input(
    processes: list[subprocess.Popen[bytes]], source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(processes, command(source, tmp_path / "state", "--json"))
    address = ready(process)
    assert process.stdin is not None
    process.stdin.close()
    with WireClient(address["master"]) as client:
        assert client.stat(b"/file").length == 4
    process.send_signal(number)
    assert process.wait(ENDS_S) == 0


PARENT = """
import subprocess, sys, threading
def start():
    global child
    child = subprocess.Popen(sys.argv[1:])
thread = threading.Thread(target=start)
thread.start()
thread.join()
child.wait()
"""


def test_child_outlives_the_thread_but_not_the_process_that_started_it(
    processes: list[subprocess.Popen[bytes]], source: Path, tmp_path: Path
) -> None:
    # Its standard input and output are this test's, so only its parent's death can end it.
    parent = start(processes, [sys.executable, "-c", PARENT, *command(source, tmp_path / "state", "--child")])
    address = ready(parent)
    with WireClient(address["master"]) as client:
        assert client.stat(b"/file").length == 4
    parent.kill()
    parent.wait()
    ended: list[bytes] = []
    # The end of the pipe comes when the last process that has it is gone.
    reader = threading.Thread(target=lambda: ended.append(output(parent).read()))
    reader.start()
    reader.join(ENDS_S)
    assert ended == [b""]


def test_wrong_fault_plan_is_told_in_one_line(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{method: ReadBlok, stall: }]")
    done = subprocess.run(
        command(source, tmp_path / "state", "--faults", str(plan)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "ReadBlok" in done.stderr
    assert "Traceback" not in done.stderr


def test_fault_plan_of_a_file_is_carried_out(
    processes: list[subprocess.Popen[bytes]], source: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults: [{method: GetStatus, nth: 2, error: {code: RESOURCE_EXHAUSTED}}]")
    process = start(processes, command(source, tmp_path / "state", "--child", "--faults", str(plan)))
    with WireClient(ready(process)["master"]) as client:
        assert client.stat(b"/file").length == 4
        with pytest.raises(grpc.RpcError) as failure:
            client.stat(b"/file")
    assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unreadable_things_are_shown_but_refused(
    processes: list[subprocess.Popen[bytes]], source: Path, tmp_path: Path
) -> None:
    (source / "closed").mkdir()
    (source / "closed" / "inside").touch()
    (source / "secret").write_bytes(b"data")
    # Root reads everything, unless it is without the capabilities to.
    rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    process = start(processes, rights + command(source, tmp_path / "state", "--child"))
    address = ready(process)
    (source / "secret").chmod(0)
    (source / "closed").chmod(0)
    try:
        with WireClient(address["master"]) as master:
            found = {info.name: info for info in master.entries(b"/")}
            assert set(found) == {b"file", b"secret", b"closed"}
            assert found[b"secret"].mode == 0
            with pytest.raises(grpc.RpcError) as failure:
                master.entries(b"/closed")
            assert failure.value.code() == grpc.StatusCode.PERMISSION_DENIED
            workers = master.blocks.GetWorkerInfoList(GetWorkerInfoListPOptions(), metadata=master.metadata).workerInfos
            with WireClient(f"127.0.0.1:{workers[0].address.dataPort}") as worker:
                with pytest.raises(grpc.RpcError) as failure:
                    worker.read(read_request(found[b"secret"]))
                assert failure.value.code() == grpc.StatusCode.PERMISSION_DENIED
    finally:
        (source / "closed").chmod(0o755)
    assert process.stdin is not None
    process.stdin.close()
    wait_until(lambda: process.poll() == 0, ENDS_S)
