"""The one thread that writes to the metadata store.

LMDB allows one write transaction at a time. Were every listing to open its own, a listing thread could wait
for another's commit while holding half an answer; so they hand their transactions (`submit`) to this thread
and go on decoding. The queue is bounded: a listing that comes in faster than the disk takes it waits, instead
of filling memory. Nothing that answers a read ever calls this module.

A job is a function of a write transaction: committed when it returns, rolled back when it raises, and the
exception goes to whoever submitted it. A full map or disk becomes `StoreFull`, any other LMDB error
`StateError`; the thread itself survives both.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import lmdb

from fusecache.cache.transaction import Transaction, begin
from fusecache.errors import StateError

T = TypeVar("T")

QUEUE_LENGTH: Final = 4
"""Jobs that may wait. Each holds up to one chunk of a listing (about 2 MB), so this bounds memory."""


class StoreFull(StateError):
    """No room in the map or on the disk."""


class StoreWriter:
    """Owns every write transaction of one store; the thread starts with the first job."""

    def __init__(self, environment: lmdb.Environment, name: str) -> None:
        self._environment = environment
        self._name = name
        self._queue: queue.Queue[tuple[Callable[[Transaction], Any], Future[Any]] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def submit(self, job: Callable[[Transaction], T]) -> Future[T]:
        """Queue a transaction; blocks while the queue is full, so never on an event loop."""
        with self._starting:
            if self._closed:
                raise StateError("the metadata store is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()  # RuntimeError when there is no thread to be had: the next job tries again
                self._thread = thread
        future: Future[T] = Future()
        self._queue.put((job, future))
        return future

    def run(self, job: Callable[[Transaction], T]) -> T:
        """Queue a transaction and wait until it is committed."""
        return self.submit(job).result()

    def close(self) -> None:
        """Commit what is queued and end the thread. Idempotent."""
        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            job, future = item
            try:
                with begin(self._environment, write=True) as txn:
                    answer = job(txn)
            except (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DiskError) as exc:
                future.set_exception(StoreFull(f"the metadata store is full: {exc}"))
            except lmdb.Error as exc:
                future.set_exception(StateError(f"the metadata store can't be written: {exc}"))
            except Exception as exc:  # noqa: BLE001 - the job's own error: its submitter's business, not this thread's
                future.set_exception(exc)
            else:
                future.set_result(answer)
            # Drop what the job holds before waiting for the next one.
            del item, job, future
