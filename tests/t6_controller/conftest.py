"""The double of the API, running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.t6_controller.api_double import ApiDouble


@pytest.fixture
def api() -> Iterator[ApiDouble]:
    with ApiDouble() as double:
        yield double
