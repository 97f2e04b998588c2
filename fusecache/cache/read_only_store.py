"""Another process's metadata store, read only: nothing is made, claimed, wiped or written here.

The writer says on the board (`cache.board`) which tables of which file are in use; `follow` opens them, and opens anew
when the writer went over to others. While none are open every look-up finds nothing, so that whoever reads asks the
writer instead. LMDB keeps one of its reader slots for each reading process; those of killed ones are freed by the
writer's `reader_check`.

LMDB must not be opened twice in one process: a process has a `ReadOnlyStore` or a `MetadataStore`, not both.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final, cast

import lmdb

from fusecache import clock
from fusecache.cache.board import StoreIdentity
from fusecache.cache.tables import FILE_NAME, MAX_READERS, MAX_TABLES, TABLES, TableReader, Tables, boot_hash
from fusecache.cache.transaction import Transaction, reader_of
from fusecache.errors import StateError


class ReadOnlyStore(TableReader):
    """See the module. Event loop only."""

    def __init__(self, *, boot: str | None = None) -> None:
        """Nothing is open until `follow`. `boot`: this boot's id."""
        self.boot = boot_hash(clock.boot_id() if boot is None else boot)
        self.identity: StoreIdentity | None = None
        """What is open."""
        self._environment: lmdb.Environment | None = None
        self.close()

    def follow(self, identity: StoreIdentity) -> bool:
        """Open what `identity` names; True when that was not open before. Raises StateError, with nothing open."""
        if identity == self.identity:
            return False
        self.close()
        path = Path(identity.folder) / FILE_NAME
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) != (identity.device, identity.file_inode):
                raise StateError(f"the metadata store in {identity.folder} is no longer the one its writer has")
            environment = self._open(path, identity.map_bytes)
        except (OSError, lmdb.Error) as exc:
            raise StateError(f"the metadata store in {identity.folder} can't be read: {exc}") from exc
        try:
            self.tables = self._open_tables(environment, identity.namespace)
        except lmdb.Error as exc:
            self._release(environment)
            raise StateError(f"{identity.namespace} in {identity.folder} can't be read: {exc}") from exc
        self._environment = environment
        self.identity = identity
        self.read = reader_of(environment)
        return True

    def close(self) -> None:
        """Unmap; look-ups find nothing then. Idempotent."""
        environment, self._environment = self._environment, None
        self.identity = None
        self.read = _read_nothing
        self.tables = _NO_TABLES
        if environment is not None:
            self._release(environment)

    def _open(self, path: Path, map_bytes: int) -> lmdb.Environment:
        return lmdb.open(
            str(path),
            subdir=False,
            # The writer's own: with a smaller map the pages beyond it can't be read.
            map_size=map_bytes,
            readonly=True,
            create=False,
            max_dbs=MAX_TABLES,
            max_readers=MAX_READERS,
            max_spare_txns=16,
            readahead=False,
        )

    def _open_tables(self, environment: lmdb.Environment, namespace: str) -> Tables:
        # Not within a transaction of ours: py-lmdb keeps a finished read transaction for the next one instead of
        # committing it, and without a commit the handles are lost (mdb_get: EINVAL).
        return Tables(*(environment.open_db(f"{namespace}/{table}".encode(), create=False) for table in TABLES))

    def _release(self, environment: lmdb.Environment) -> None:
        environment.close()


class _NoRows:
    """A transaction, and a cursor, over nothing."""

    def get(self, key: bytes, default: bytes | None = None, *, db: object) -> bytes | None:
        return default

    def stat(self, db: object) -> dict[str, int]:
        return {"entries": 0}

    def cursor(self, *, db: object = None) -> _NoRows:
        return self

    def set_range(self, key: bytes) -> bool:
        return False

    def __enter__(self) -> _NoRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


_NOTHING: Final = cast(Transaction, _NoRows())
_NO_TABLES: Final = Tables(*(cast(lmdb._Database, None) for _ in TABLES))


def _read_nothing() -> Transaction:
    return _NOTHING
