"""gRPC ignores channel options that it does not know: every one that is set must be one of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc

import fusecache

OPTION = re.compile(r'"(grpc\.[a-z0-9_.]+)"')


def options() -> list[tuple[str, str]]:
    """(file, option) of the package's sources; option names without a value beside them are methods' or modules'."""
    package = Path(fusecache.__file__).parent
    found = {
        (str(path.relative_to(package)), match[1])
        for path in package.rglob("*.py")
        if "pb" not in path.relative_to(package).parts
        for match in OPTION.finditer(path.read_text())
    }
    return sorted(found)


@pytest.mark.parametrize(("file", "option"), options())
def test_grpc_knows_every_option_that_is_set(file: str, option: str) -> None:
    """A name with one word too many made servers close idle connections for too many pings, after two minutes."""
    assert option.encode() + b"\0" in Path(cygrpc.__file__).read_bytes(), f"{file}: gRPC ignores {option}"


def test_grpc_options_are_found_at_all() -> None:
    assert len(options()) > 10
