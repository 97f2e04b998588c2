"""One table decides errno; every exception of ours has a row's answer."""

from __future__ import annotations

import errno

import pytest

from fusecache import errors
from fusecache.fs.errno_map import ERRNO_TABLE, errno_name, errno_of


def test_errno_missing_file_is_enoent_not_eio() -> None:
    """User report 54."""
    assert errno_of(errors.NotFound("x")) == errno.ENOENT


def test_errno_dead_id_is_estale() -> None:
    assert errno_of(errors.StaleId("x")) == errno.ESTALE


def test_errno_incomplete_file_is_ebusy() -> None:
    """User report 32."""
    assert errno_of(errors.Incomplete("x")) == errno.EBUSY


@pytest.mark.parametrize("bug", [KeyError("x"), MemoryError(), RecursionError()])
def test_errno_unknown_exception_is_eio(bug: Exception) -> None:
    assert errno_of(bug) == errno.EIO


def test_errno_every_upstream_error_has_its_own_row() -> None:
    kinds = {kind for kind, _, _ in ERRNO_TABLE}
    leaves = set(errors.UpstreamError.__subclasses__())
    assert leaves <= kinds


def test_errno_no_row_is_hidden_by_an_earlier_one() -> None:
    for index, (kind, _, _) in enumerate(ERRNO_TABLE):
        assert not any(issubclass(kind, earlier) for earlier, _, _ in ERRNO_TABLE[:index]), kind


def test_errno_names_are_what_errno_h_calls_them() -> None:
    assert errno_name(errno.EIO) == "EIO"
    assert errno_name(99999) == "99999"
