"""The new side of a take-over, played by a test: says what it wants to, and goes when it wants to.

Also what the daemon does before it becomes a supervisor (`asked`): for tests that start only a supervisor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fusecache.kernel.supervisor.takeover.facts import Descriptors, Facts
from fusecache.kernel.supervisor.takeover.line import Line, close_all
from fusecache.kernel.supervisor.takeover.messages import PROTOCOLS
from fusecache.kernel.supervisor.takeover.private_socket import connect
from fusecache.kernel.supervisor.takeover.token import take_token

ANSWER_S = 20.0


class Taker:
    """One attempt; a context manager that closes whatever it holds."""

    def __init__(self, path: Path, source: str, protocols: Sequence[int] = PROTOCOLS) -> None:
        """Say hello."""
        self.line: Line = connect(str(path))
        self.facts: Facts | None = None
        self._held: list[int] = []
        self.say("hello", protocols=list(protocols), version="0.test", source=source, unheard_of=True)

    def say(self, kind: str, **fields: Any) -> None:
        self.line.send({"kind": kind, **fields})

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which must be one of this kind; its descriptors are kept until the end."""
        message, descriptors = self.line.receive_within(ANSWER_S)
        self._held += descriptors
        assert message["kind"] == kind, message
        return message

    def given(self) -> Descriptors:
        """Go on until everything was given."""
        self.hear("yielding")
        self.facts = Facts.from_message(self.hear("given"))
        return Descriptors.checked(self._held)

    def drained(self) -> None:
        """Go on until the old gate has been emptied."""
        self.given()
        self.say("ready")
        self.hear("drained")

    def take(self) -> bool:
        """The token."""
        return take_token(self._held[3])

    def close(self) -> None:
        """Gone, as a process that was killed."""
        self.line.close()
        close_all(self._held)
        self._held = []

    def __enter__(self) -> Taker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.close()


def asked(path: Path, source: str) -> tuple[Taker, dict[str, Any], list[int]]:
    """As `fusecache mount` does before anything else: the taker to be closed once a supervisor was started with the
    specification's field `takeover`, which is the second, and these descriptors."""
    taker = Taker(path, source)
    descriptors = taker.given()
    assert taker.facts is not None
    numbers = [taker.line.fileno(), *descriptors.all()]
    field = {"facts": taker.facts.to_message(), "descriptors": list(descriptors.all()), "line": taker.line.fileno()}
    return taker, field, numbers
