"""`auto` between no-open and passthrough, by values only."""

from __future__ import annotations

import pytest

from fusecache.daemon.open_mode_choice import LARGE_FILE_BYTES, SampledFile, choose


@pytest.mark.parametrize(
    ("sample", "mode", "reason"),
    [
        ([], "no-open", "no file"),
        ([SampledFile(110 << 10, True)] * 100, "no-open", "small files"),
        ([SampledFile(LARGE_FILE_BYTES - 1, True)], "no-open", "small files"),
        ([SampledFile(LARGE_FILE_BYTES, True)], "passthrough", "100 %"),
        ([SampledFile(1 << 30, False)], "no-open", "0 %"),
        # By bytes, not by number: one large local file outweighs many small ones elsewhere.
        ([SampledFile(1 << 30, True), *[SampledFile(1 << 10, False)] * 20], "passthrough", "large files"),
        ([SampledFile(1 << 30, True), SampledFile(2 << 30, False)], "no-open", "33 %"),
        ([SampledFile(0, False)] * 3, "no-open", "small files"),
    ],
)
def test_open_mode_choice(sample: list[SampledFile], mode: str, reason: str) -> None:
    chosen, why = choose(sample)
    assert chosen == mode
    assert reason in why
