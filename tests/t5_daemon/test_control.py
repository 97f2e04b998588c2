"""The control socket: real sockets, a real peer, limits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.daemon import control, control_client
from fusecache.daemon.control import ControlServer, Handler
from fusecache.daemon.control_client import NobodyAnswered, call, find_socket, socket_path
from fusecache.daemon.mountpoint import MountInfo
from fusecache.errors import (
    FusecacheError,
    InterruptedWait,
    MountError,
    NotFound,
    ProtocolError,
    StateError,
    UsageError,
)
from fusecache.kernel.control_listener import ControlListener
from tests.support import log_noise
from tests.support.limits import no_more_descriptors

TIMEOUT_S = 10.0


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"echo": request}


async def missing(request: dict[str, Any]) -> dict[str, Any]:
    raise NotFound("/x is not there")


async def broken(request: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError("a bug")


async def endless(request: dict[str, Any]) -> dict[str, Any]:
    await trio.sleep_forever()
    return {}


HANDLERS = {
    name: Handler(name, fn, privileged)
    for name, fn, privileged in (
        ("status", echo, False),
        ("refresh", echo, True),
        ("missing", missing, False),
        ("broken", broken, False),
        ("endless", endless, False),
    )
}


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[ControlListener]:
    """A server at `path`; its end takes the socket away."""
    listener = ControlListener(path)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(listener.socket, HANDLERS).run)
            yield listener
            nursery.cancel_scope.cancel()
    finally:
        listener.close()


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    socket_file = tmp_path / "run" / "mount" / "control.sock"
    async with served(socket_file):
        yield socket_file


async def ask(path: Path, kind: str, timeout_s: float = TIMEOUT_S, **fields: Any) -> dict[str, Any]:
    return await trio.to_thread.run_sync(lambda: call(path, kind, timeout_s, **fields))


async def talk(path: Path, *pieces: bytes) -> list[bytes]:
    """Send bytes, read until the server closes; the lines it sent."""
    stream = await trio.open_unix_socket(str(path))
    received = b""
    async with stream:
        for piece in pieces:
            await stream.send_all(piece)
        await stream.send_eof()
        with trio.fail_after(TIMEOUT_S):
            async for chunk in stream:
                received += chunk
    return received.splitlines()


async def test_call_answer_has_what_the_handler_said(path: Path) -> None:
    assert await ask(path, "status", paths=["a", "caf\udce9"]) == {"echo": {"paths": ["a", "caf\udce9"]}}


async def test_call_error_of_the_handler_is_raised_as_its_class(path: Path) -> None:
    with pytest.raises(NotFound, match="/x is not there"):
        await ask(path, "missing")


async def test_call_unknown_kind_names_the_known(path: Path) -> None:
    with pytest.raises(UsageError, match=r"'format-disk'.*broken, endless, missing, refresh, status"):
        await ask(path, "format-disk")


async def test_bug_in_a_handler_is_an_answer_and_the_server_goes_on(
    path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("control_handler_failed", count=1)
    with pytest.raises(FusecacheError, match="broken failed unexpectedly"):
        await ask(path, "broken")
    assert await ask(path, "status") == {"echo": {}}


async def test_handler_that_does_not_end_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDLER_S", 0.05)
    with pytest.raises(FusecacheError, match=r"endless took longer than 0.05 s"):
        await ask(path, "endless")


async def test_call_without_answer_in_time_is_interrupted(path: Path) -> None:
    with pytest.raises(InterruptedWait, match=r"did not answer 'endless' within 0\.2 s"):
        await ask(path, "endless", 0.2)


def test_f17_call_without_a_descriptor_is_a_mount_error(tmp_path: Path) -> None:
    """`serve` asks its mounts every few seconds, in a thread that must not end by it."""
    with no_more_descriptors(os.getpid()), pytest.raises(MountError, match="Too many open files"):
        call(tmp_path / "control.sock", "status", TIMEOUT_S)


async def test_privileged_kind_is_open_to_the_daemons_user(path: Path) -> None:
    assert await ask(path, "refresh") == {"echo": {}}


async def test_privileged_kind_is_refused_to_others_and_reading_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, expected_logs: log_noise.Declare
) -> None:
    expected_logs("control_request_refused", count=1)
    monkeypatch.setattr(control, "_peer_uid", lambda connection: 4711)
    with pytest.raises(MountError, match="not for uid 4711"):
        await ask(path, "refresh")
    assert await ask(path, "status") == {"echo": {}}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
async def test_peer_of_another_user_is_known_by_the_kernel(path: Path, expected_logs: log_noise.Declare) -> None:
    expected_logs("control_request_refused", count=1)
    script = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "os.chdir(os.path.dirname(sys.argv[1]))\n"  # before: the folders above are this user's alone
        "os.setuid(65534)\n"
        "s.connect(os.path.basename(sys.argv[1]))\n"
        's.sendall(b\'{"kind": "refresh"}\\n{"kind": "status"}\\n\')\n'
        "s.shutdown(socket.SHUT_WR)\n"
        "sys.stdout.write(s.makefile().read())\n"
    )
    done = await trio.run_process([sys.executable, "-I", "-c", script, str(path)], capture_stdout=True)
    refused, answered = map(json.loads, done.stdout.splitlines())
    assert (refused["type"], answered["ok"]) == ("MountError", True)
    assert "uid 65534" in refused["error"]


async def test_socket_is_open_to_all_in_a_folder_nobody_else_can_write(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


async def test_several_requests_on_one_connection_are_answered_in_order(path: Path) -> None:
    lines = await talk(path, b'{"kind": "status", "n": 1}\n{"kind": "sta', b'tus", "n": 2}\n')
    assert [json.loads(line)["echo"] for line in lines] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    "request_line", [b"\n", b"x\n", b"[]\n", b"3\n", b'{"kind": 3}\n', b"\xff\n", b"[" * 50_000 + b"\n"]
)
async def test_request_that_is_none_is_answered_with_usage(path: Path, request_line: bytes) -> None:
    (line,) = await talk(path, request_line)
    assert json.loads(line)["type"] == "UsageError"


async def test_request_too_long_is_refused_and_the_connection_closed(path: Path) -> None:
    (line,) = await talk(path, b'{"kind": "status", "x": "' + b"y" * control.MAX_REQUEST + b'"}\n')
    assert "longer than 65536 bytes" in json.loads(line)["error"]


async def test_request_that_never_ends_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_S", 0.05)
    stream = await trio.open_unix_socket(str(path))
    async with stream:
        await stream.send_all(b'{"kind"')
        with trio.fail_after(TIMEOUT_S):
            assert await stream.receive_some() == b""


async def test_connections_of_one_other_user_are_bounded_and_do_not_keep_the_owner_out(
    path: Path, monkeypatch: pytest.MonkeyPatch, expected_logs: log_noise.Declare
) -> None:
    expected_logs("control_connection_refused")
    with monkeypatch.context() as stranger:
        stranger.setattr(control, "_peer_uid", lambda connection: 4711)
        streams = [await trio.open_unix_socket(str(path)) for _ in range(control.MAX_CONNECTIONS_PER_USER + 1)]
        with trio.fail_after(TIMEOUT_S):
            assert await streams[-1].receive_some() == b""
    assert await ask(path, "status") == {"echo": {}}
    for stream in streams:
        await stream.aclose()


async def test_socket_left_by_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mount" / "control.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(MountError, match="is it running"):
        await ask(path, "status")
    async with served(path):
        assert await ask(path, "status") == {"echo": {}}


async def test_end_takes_the_socket_away(tmp_path: Path) -> None:
    path = tmp_path / "mount" / "control.sock"
    async with served(path):
        assert path.is_socket()
    assert not path.parent.exists()


async def test_end_leaves_a_later_daemons_socket(tmp_path: Path) -> None:
    path = tmp_path / "mount" / "control.sock"
    first = ControlListener(path)
    async with served(path):
        first.close()
        assert await ask(path, "status") == {"echo": {}}


async def test_question_that_comes_while_nobody_serves_waits_for_the_next_who_does(tmp_path: Path) -> None:
    path = tmp_path / "mount" / "control.sock"
    listener = ControlListener(path)
    answers: list[dict[str, Any]] = []

    async def ask_early() -> None:
        answers.append(await ask(path, "status"))

    try:
        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_early)
                while not select.select([listener.socket], [], [], 0)[0]:
                    await trio.sleep(0.01)
                assert answers == []
                server = ControlServer(listener.socket.dup(), HANDLERS)
                await nursery.start(server.run)
                while not answers:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
    finally:
        listener.close()
    assert answers == [{"echo": {}}]


class Mounted:
    """A mount as commands find it, as far as they ask its socket: this test's, alive or not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime_dir = folder / "run"
        self.info = MountInfo(1, "0:1", "fuse.fusecache", "/x", os.fsencode(folder / "mnt"), "rw,user_id=0")
        self.path = socket_path(self.runtime_dir, folder / "mnt")
        self.lives = True
        self.looked_at = 0
        monkeypatch.setattr(control_client, "_lives", self._lives)
        monkeypatch.setattr(control_client, "MOST_TRIES", int(TIMEOUT_S / control_client.AGAIN_S))

    def _lives(self, mount: MountInfo) -> bool:
        assert mount == self.info
        self.looked_at += 1
        return self.lives

    async def ask(self, kind: str) -> dict[str, Any]:
        return await trio.to_thread.run_sync(
            lambda: control_client.ask(self.info, self.runtime_dir, kind, 3 * TIMEOUT_S)
        )

    async def wait_until_looked_at(self) -> None:
        with trio.fail_after(TIMEOUT_S):
            while not self.looked_at:
                await trio.sleep(0.01)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    return Mounted(tmp_path, monkeypatch)


async def test_question_that_its_first_owner_leaves_unanswered_is_for_the_next_one(mounted: Mounted) -> None:
    """S42: as in a take-over. The old supervisor closes its socket when the new one has listened for a while."""
    answers: list[dict[str, Any]] = []

    async def ask_early() -> None:
        answers.append(await mounted.ask("refresh"))

    old = ControlListener(mounted.path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_early)
        with trio.fail_after(TIMEOUT_S):
            while not select.select([old.socket], [], [], 0)[0]:
                await trio.sleep(0.01)
        async with served(mounted.path):
            old.close(is_last=False)
            with trio.fail_after(TIMEOUT_S):
                while not answers:
                    await trio.sleep(0.01)
    assert answers == [{"echo": {}}]
    assert mounted.looked_at == 1


@pytest.mark.parametrize("is_refused", [False, True])
async def test_question_without_a_socket_waits_for_the_next_owners(mounted: Mounted, is_refused: bool) -> None:
    """Between the old name's end and the new one's, and between that and listen(2)."""
    mounted.path.parent.mkdir(parents=True)
    if is_refused:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(str(mounted.path))
    answers: list[dict[str, Any]] = []

    async def ask_early() -> None:
        answers.append(await mounted.ask("status"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_early)
        await mounted.wait_until_looked_at()
        async with served(mounted.path):
            with trio.fail_after(TIMEOUT_S):
                while not answers:
                    await trio.sleep(0.01)
    assert answers == [{"echo": {}}]


async def test_question_to_a_mount_that_is_gone_or_dead_is_asked_once(mounted: Mounted) -> None:
    mounted.path.parent.mkdir(parents=True)
    mounted.lives = False
    with pytest.raises(NobodyAnswered, match="is not in"):
        await mounted.ask("status")
    assert mounted.looked_at == 1


async def test_question_that_nobody_takes_is_asked_for_a_bounded_time(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "MOST_TRIES", 3)
    mounted.path.parent.mkdir(parents=True)
    with pytest.raises(NobodyAnswered, match="is not in"):
        await mounted.ask("status")
    assert mounted.looked_at == 2


async def test_question_to_a_mount_of_another_runtime_dir_is_not_asked_again(mounted: Mounted) -> None:
    with pytest.raises(MountError, match="give the --runtime-dir it was mounted with"):
        await mounted.ask("status")
    assert mounted.looked_at == 0


async def test_an_error_that_the_daemon_answers_is_its_answer(mounted: Mounted) -> None:
    async with served(mounted.path):
        with pytest.raises(NotFound, match="/x is not there"):
            await mounted.ask("missing")
    assert mounted.looked_at == 0


async def test_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "control.sock"
    async with served(path):
        assert await ask(path, "status") == {"echo": {}}


def test_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"file/m can't be made: Not a directory"):
        ControlListener(tmp_path / "file" / "m" / "control.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(StateError, match="theirs belongs to uid 65534, not to 0"):
        ControlListener(folder / "control.sock")


@pytest.mark.parametrize(
    ("answer", "error"),
    [(b"what?\n", "not JSON"), (b"[]\n", "no object"), (b'{"ok": tr\n', "not JSON")],
)
async def test_call_answer_that_is_none_is_a_protocol_error(tmp_path: Path, answer: bytes, error: str) -> None:
    path = tmp_path / "liar.sock"
    listener = trio.SocketListener(await bound(path))

    async def lie(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(1000)
            await stream.send_all(answer)

    await with_listener(listener, lie, lambda: expect_protocol_error(path, error))


@pytest.mark.parametrize("answer", [b"", b'{"ok": tr'])
async def test_call_to_who_ends_before_the_answer_is_whole_was_not_answered(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "gone.sock"

    async def end(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(1000)
            await stream.send_all(answer)

    async def expect() -> None:
        with pytest.raises(NobodyAnswered, match="went away before it had answered 'status'"):
            await ask(path, "status")

    await with_listener(trio.SocketListener(await bound(path)), end, expect)


async def bound(path: Path) -> trio.socket.SocketType:
    server = trio.socket.socket(socket.AF_UNIX)
    await server.bind(str(path))
    server.listen()
    return server


async def with_listener(
    listener: trio.SocketListener,
    handler: Callable[[trio.SocketStream], Awaitable[None]],
    body: Callable[[], Awaitable[None]],
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handler, [listener])
        await body()
        nursery.cancel_scope.cancel()
    await listener.aclose()


async def expect_protocol_error(path: Path, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        await ask(path, "status")


def test_socket_path_differs_by_mountpoint_and_is_short(tmp_path: Path) -> None:
    run = Path("/run/fusecache")
    first, second = socket_path(run, tmp_path / "a"), socket_path(run, tmp_path / "b")
    assert first != second
    assert len(str(first)) < 60
    assert socket_path(run, tmp_path / "x" / ".." / "a") == first


def test_find_socket_of_a_mount_without_one_says_where_it_looked(tmp_path: Path) -> None:
    mount = MountInfo(1, "0:1", "fuse.fusecache", "/x", os.fsencode(tmp_path), "rw,user_id=1000")
    with pytest.raises(MountError, match=r"/run/user/1000/fusecache.*; give the --runtime-dir"):
        find_socket(mount, tmp_path / "run")


async def test_find_socket_told_by_a_mount_counts_only_when_its_owner_listens(path: Path, tmp_path: Path) -> None:
    (tmp_path / ".fusecache").mkdir()
    (tmp_path / ".fusecache" / "config").write_text(json.dumps({"control_socket": str(path)}))

    def found(owner: int) -> Path:
        options = f"rw,user_id={owner}"
        return find_socket(MountInfo(1, "0:1", "fuse.fusecache", "/x", os.fsencode(tmp_path), options), tmp_path / "no")

    assert await trio.to_thread.run_sync(found, os.geteuid()) == path
    with pytest.raises(MountError, match="is not in"):
        await trio.to_thread.run_sync(found, os.geteuid() + 1)


@pytest.mark.parametrize("content", ["", "{}", "[]", "3", '{"control_socket": 3}', '{"control_socket": "relative"}'])
def test_find_socket_config_that_names_none_is_no_socket(tmp_path: Path, content: str) -> None:
    (tmp_path / ".fusecache").mkdir()
    (tmp_path / ".fusecache" / "config").write_text(content)
    mount = MountInfo(1, "0:1", "fuse.fusecache", "/x", os.fsencode(tmp_path), "rw,user_id=0")
    with pytest.raises(MountError, match="is not in"):
        find_socket(mount, tmp_path / "run")


def test_client_imports_no_event_loop() -> None:
    script = "import sys, fusecache.daemon.control_client; sys.exit('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
