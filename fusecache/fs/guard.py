"""What every handler goes through: counted, timed, and whatever it raises becomes an errno.

pyfuse3 ends its loop, and with it the mount, on any exception that is not FUSEError, and leaves the request without an
answer. So nothing else leaves a guarded handler: our errors get their errno from `errno_map`, anything else is a bug,
answered EIO and logged with its traceback. Cancellation is not an exception in this sense and passes.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

import structlog
from pyfuse3 import FUSEError

from fusecache.errors import FusecacheError
from fusecache.fs.errno_map import errno_name, errno_of
from fusecache.metrics import Counter, Histogram, Metrics

log = structlog.get_logger(__name__)

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


class RequestMeter:
    """Counts and times requests by operation; cells are made at an operation's first request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._cells: dict[str, tuple[Counter, Histogram]] = {}
        self.in_flight = metrics.gauge("fusecache_requests_in_flight")

    def cells(self, op: str) -> tuple[Counter, Histogram]:
        """(requests, durations) of an operation."""
        found = self._cells.get(op)
        if found is None:
            found = self._cells[op] = (
                self._metrics.counter("fusecache_requests_total", op=op),
                self._metrics.histogram("fusecache_request_duration_seconds", op=op),
            )
        return found

    def failed(self, op: str, number: int) -> None:
        """Count an error answer."""
        self._metrics.counter("fusecache_request_errors_total", op=op, errno=errno_name(number)).inc()


def served(handler: _Handler) -> _Handler:
    """Guard one handler of a class that has a `meter`: a value or FUSEError leaves it, never anything else."""
    op = handler.__name__

    @functools.wraps(handler)
    async def guarded(self: Any, *args: Any) -> Any:
        meter: RequestMeter = self.meter
        requests, durations = meter.cells(op)
        started = perf_counter()
        meter.in_flight.value += 1
        try:
            return await handler(self, *args)
        except FUSEError as error:
            meter.failed(op, error.errno)
            raise
        except FusecacheError as error:
            number = errno_of(error)
            if number == errno.EIO:
                log.warning("request failed", op=op, error=str(error), kind=type(error).__name__)
            meter.failed(op, number)
            raise FUSEError(number) from None
        except Exception:
            log.exception("unexpected exception in a handler", op=op, inode=args[0] if args else None)
            meter.failed(op, errno.EIO)
            raise FUSEError(errno.EIO) from None
        finally:
            meter.in_flight.value -= 1
            durations.observe(perf_counter() - started)
            requests.value += 1

    return guarded  # type: ignore[return-value]  # functools.wraps keeps the handler's shape
