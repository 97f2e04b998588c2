"""Answers to the kernel. One `write` each: the kernel takes it whole, also beside notifications of another thread."""

from __future__ import annotations

import errno
import os

from fusecache.kernel import wire
from fusecache.kernel.log import Log


class Unmounted(Exception):
    """The kernel ended the connection."""


class Answers:
    """The writing side of the device."""

    def __init__(self, device: int, log: Log) -> None:
        self._device = device
        self._log = log

    def write(self, answer: bytes | memoryview) -> bool:
        """Answer a request; False when it is gone. Raises Unmounted."""
        try:
            os.write(self._device, answer)
        except OSError as exc:
            return self._not_written(exc)
        return True

    def write_error(self, unique: int, number: int) -> bool:
        """Answer with an errno; 0: done, with nothing to say. As `write`."""
        return self.write(wire.error_answer(unique, number))

    def write_data(self, unique: int, content: memoryview) -> bool:
        """Answer a READ. As `write`."""
        try:
            os.writev(self._device, [wire.data_header(unique, len(content)), content])
        except OSError as exc:
            return self._not_written(exc)
        return True

    def _not_written(self, exc: OSError) -> bool:
        if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
            raise Unmounted from exc
        if exc.errno != errno.ENOENT:  # ENOENT is normal: the request was aborted, its caller has its answer
            self._log.error("the kernel refused an answer", why=exc.strerror)
        return False
