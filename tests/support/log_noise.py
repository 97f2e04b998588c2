"""Find warnings, errors and tracebacks in what a test printed, less what the test declared.

Works on pytest's captured sections (log, stdout, stderr), so that it covers this process and the standard
error of child processes, which tests/support/mounting.py copies there. It does not decide what is an error:
a line counts when it says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

ANSI = re.compile(r"\x1b\[[0-9;]*m")

NOISE = re.compile(
    r"""
      ^(WARNING|ERROR|CRITICAL)\b              # pytest's capture of `logging`
    | \[(warning|error|critical)\s*\]          # structlog's console renderer
    | "level":\s*"(warning|error|critical)"    # structlog's JSON renderer
    | ^Traceback\ \(most\ recent\ call\ last\)
    | Exception\ ignored\ in
    | \b\w*Warning:\                           # Python warnings of a child process
    | ^[EWF]\d{4}\ .*\.cc:\d+\]                # gRPC's C core
    """,
    re.VERBOSE,
)

OF_OTHERS = re.compile(
    r"""
      unmounted\ here,\ but\ another\ mount\ namespace\ still\ has\ the\ mount
    | ExecuteBatchError\ raised\ in\ core\ by\ servicer\ method
    """,
    re.VERBOSE,
)
"""What no test can rule out. In any that unmounts: one that runs beside it has copied the mount namespace a moment ago.
In any with a server of grpc.aio: a client left while the server sent the status of its stream (its core says so, in
grpcio 1.85, and nothing is lost)."""


class Expectation(NamedTuple):
    """Noise a test declared."""

    pattern: str
    """Regular expression, searched in each noisy record."""
    count: int | None
    """How many records must match; None = one or more."""
    optional: bool = False
    """The noise may come, as often as it likes: whether it does depends on timing that the test does not fix."""


class Declare(Protocol):
    """The `expected_logs` fixture."""

    def __call__(self, pattern: str, *, count: int | None = None, optional: bool = False) -> None: ...


def records(text: str) -> list[str]:
    """The noisy records of a captured section: a line, or a line with the traceback directly below it."""
    found: list[list[str]] = []
    in_traceback = False
    directly_below = False
    for line in ANSI.sub("", text).splitlines():
        if in_traceback:
            found[-1].append(line)
            # The body is indented or empty; the first line that is neither names the exception and ends it.
            in_traceback = not line or line[0].isspace()
        elif line.startswith("Traceback (most recent call last)"):
            if directly_below:
                found[-1].append(line)
            else:
                found.append([line])
            in_traceback = True
        elif NOISE.search(line):
            found.append([line])
            directly_below = True
        else:
            directly_below = False
    return ["\n".join(lines) for lines in found]


def check(sections: Iterable[tuple[str, str]], expectations: Sequence[Expectation]) -> list[str]:
    """Problems in words: undeclared noise, and declared noise that did not come."""
    noisy = [record for _, text in sections for record in records(text)]
    matches = [0] * len(expectations)
    problems = []
    for record in noisy:
        matched = False
        for index, expectation in enumerate(expectations):
            if re.search(expectation.pattern, record):
                matches[index] += 1
                matched = True
        if not matched and not OF_OTHERS.search(record):
            problems.append(f"not declared: {record}")
    for expectation, seen in zip(expectations, matches, strict=True):
        if expectation.optional:
            continue
        if (expectation.count is None and seen == 0) or expectation.count not in (None, seen):
            wanted = "at least 1" if expectation.count is None else expectation.count
            problems.append(f"declared {wanted} of {expectation.pattern!r}, saw {seen}")
    return problems
