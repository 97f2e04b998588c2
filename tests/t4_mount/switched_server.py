"""An embedded server in a process of its own, with switches: hold answers back, say of a file that it is unfinished.

A process of its own, so that its connections and threads are not the test's, whose mounts connect to it when they like.
`SwitchedServer` is the test's end; run as a module this file is the other one: commands are JSON lines on standard
input, each answered by one on standard output, and its end ends the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.t4_mount.board import BLOCK

UNFINISHED = b"unfinished"
"""The name that `say_unfinished` is about."""

STOP_S = 15.0


class HeldCall:
    """A rule by which calls are held back."""

    def __init__(self, server: SwitchedServer, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def injected(self) -> int:
        """How many calls it has held back so far."""
        return int(self._server.ask(do="injected", rule=self._number))


class SwitchedServer:
    """The server as a test sees it; ends with the block."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self._state = state
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> SwitchedServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.folder), str(self._state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"alluxio://{self._answer()}/"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=STOP_S)
        finally:
            self._process.kill()
            self._process.communicate()

    def hold(self, seconds: float, *, nth: int | None = None, times: int | None = None) -> HeldCall:
        """Hold back calls for a block's bytes: the nth from now on, or all."""
        return HeldCall(self, int(self.ask(do="hold", seconds=seconds, nth=nth, times=times)))

    def clear(self) -> None:
        """Hold nothing back any longer; what is held stays so until its time is over."""
        self.ask(do="clear")

    def say_unfinished(self, active: bool) -> int:
        """Whether files of that name are said to be still written; how often it was said so far."""
        return int(self.ask(do="unfinished", active=active))

    def ask(self, **command: Any) -> Any:
        """One command, one answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def main(folder: str, state: str) -> None:
    """The server's end."""
    from fusecache.embedded.faults import FaultPlan, FaultRule
    from fusecache.embedded.server import EmbeddedServer

    plan = FaultPlan()
    rules: list[FaultRule] = []
    said, active = 0, False

    def rewrite(method: str, answer: Any) -> Any:
        nonlocal said
        if active and method in ("ListStatus", "GetStatus"):
            for info in answer.fileInfos if method == "ListStatus" else [answer.fileInfo]:
                if info.name == UNFINISHED:
                    said += 1
                    info.completed = False
                    info.length = 0
                    info.ClearField("blockIds")
                    info.ClearField("fileBlockInfos")
        return answer

    with EmbeddedServer(Path(folder), Path(state), block_size=BLOCK, faults=plan, rewrite=rewrite) as server:
        print(json.dumps(server.master_target), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer: Any = None
            if command["do"] == "hold":
                rule = plan.on("ReadBlock", nth=command["nth"], times=command["times"])
                rules.append(rule.delay(command["seconds"]))
                answer = len(rules) - 1
            elif command["do"] == "injected":
                answer = rules[command["rule"]].injected
            elif command["do"] == "unfinished":
                active = command["active"]
                answer = said
            else:
                plan.clear()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
