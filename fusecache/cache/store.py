"""Metadata on the node's disk: LMDB tables per cluster, read without locks, written by one thread.

A kernel request reads here in one short read transaction (`read`); a listing is put in by `cache.listing`
through `writer`. A namespace (cluster id + mounted path, so that equal ids of two clusters, or of two mounts with
different roots, never meet) has the tables that `cache.tables` describes; other processes read them through
`cache.read_only_store`.

A *shelf* is one generation of one folder's listing. Nearly every new listing differs little and is applied to
its shelf in one transaction. A listing with many differences is written to a new shelf beside the old one, in
bounded transactions that no reader can see, and then one transaction flips the folder over: atomic without a
transaction of a million entries (whose dirty pages would cost 300 MB of private memory and stay with LMDB).

Times are kept as (boot, CLOCK_BOOTTIME). An unknown format or a torn file is dropped, never migrated. The file
is opened by the process that uses it (LMDB does not survive a fork) and once per process. It decides nothing
about freshness and does not know paths.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Final, NamedTuple, cast

import lmdb
import structlog

from fusecache import clock
from fusecache.cache import state_folder
from fusecache.cache.board import StoreIdentity
from fusecache.cache.tables import (
    FILE_NAME,
    MAX_READERS,
    MAX_TABLES,
    TABLES,
    TableReader,
    Tables,
    boot_hash,
    id_key,
    id_of,
)
from fusecache.cache.transaction import Transaction, begin, reader_of
from fusecache.cache.writer import StoreWriter
from fusecache.errors import StateError
from fusecache.private_folder import prepare_private_folder

log = structlog.get_logger(__name__)

FORMAT: Final = b"fusecache-metadata-2"
"""Layout of the tables; another one is dropped. Records carry their own version."""

_MAX_MOUNTS: Final = 16


class MetadataStore(TableReader):
    """The tables of one namespace. Reading is safe from any thread; writing goes through `writer`."""

    def __init__(
        self,
        folder: Path,
        cluster_id: str,
        *,
        root_path: bytes,
        map_bytes: int = 64 << 30,
        boot: str | None = None,
    ) -> None:
        """Open or create. `map_bytes` is the size of the sparse map: a limit, not a cost.

        Raises StateError: the folder's rights, another process with the same namespace, no space.
        """
        boot = clock.boot_id() if boot is None else boot
        self.boot = boot_hash(boot)
        self.held_shelves: Final[set[int]] = set()
        """Shelves somebody still builds or compares; the sweeper leaves them alone."""
        self._folder = folder
        self._map_bytes = map_bytes
        self._closed = False
        prepare_private_folder(folder)
        with state_folder.opening(folder):
            self._claim = self._claim_namespace(cluster_id, root_path, boot)
            try:
                self._environment = _share_environment(folder, map_bytes, boot)
                try:
                    self._claim.mark_open()
                    self._drop_other_clusters(cluster_id, boot)
                    self.tables = self._open_tables()
                except BaseException:
                    _drop_environment(folder)
                    raise
            except lmdb.Error as exc:
                self._claim.release(clean=False)
                raise StateError(f"metadata store in {folder} can't be opened: {exc}") from exc
            except BaseException:
                self._claim.release(clean=False)
                raise
        self.writer: Final = StoreWriter(self._environment, "metadata-writer")
        self.read = reader_of(self._environment)

    def close(self) -> None:
        """Commit what is queued, sync, give the namespace up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.writer.close()
        with state_folder.opening(self._folder):
            self._environment.sync(True)
            _drop_environment(self._folder)
            self._claim.release(clean=True)

    def __enter__(self) -> MetadataStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def size_bytes(self) -> int:
        """Disk used by the whole file (all namespaces)."""
        return os.stat(self._folder / FILE_NAME).st_blocks * 512

    def reader_check(self) -> int:
        """Free reader slots of dead processes; to be called after each death. Returns how many."""
        return int(self._environment.reader_check())

    def reset(self, txn: Transaction) -> None:
        """Forget everything in this namespace (a writer job): the way out of a full map."""
        for table in self.tables[:-1]:
            txn.drop(table, delete=False)

    def nested(self, txn: Transaction) -> Transaction:
        """A transaction within a writer job that can be undone by itself."""
        return cast(Transaction, self._environment.begin(parent=cast(lmdb.Transaction, txn), write=True))

    def next_shelf(self, txn: Transaction) -> int:
        """A shelf number never used before (within a writer job)."""
        shelf = id_of(txn.get(b"next_shelf", id_key(1), db=self.tables.meta))
        txn.put(b"next_shelf", id_key(shelf + 1), db=self.tables.meta)
        return shelf

    @property
    def namespace(self) -> str:
        """Prefix of this store's tables: cluster, mounted path, and a number when it is mounted several times."""
        return self._claim.namespace

    def identity(self) -> StoreIdentity:
        """What another process needs to read these tables (`cache.read_only_store`)."""
        status = os.stat(self._folder / FILE_NAME)
        return StoreIdentity(str(self._folder.resolve()), self.namespace, self._map_bytes, status.st_dev, status.st_ino)

    def _claim_namespace(self, cluster_id: str, root_path: bytes, boot: str) -> state_folder.Claim:
        # Each mount of one source has a set of tables of its own: hot entries of one process would not notice
        # what another writes. The lowest free number is taken, so that a restart finds its tables again.
        base = f"{cluster_id}.{hashlib.blake2b(root_path, digest_size=8).hexdigest()}"
        for number in range(_MAX_MOUNTS):
            claim = state_folder.try_claim(self._folder, f"{base}.{number}", boot)
            if claim is not None:
                return claim
        raise StateError(f"{_MAX_MOUNTS} mounts of one source already keep their metadata in {self._folder}")

    def _drop_other_clusters(self, cluster_id: str, boot: str) -> None:
        """Another cluster id for the same path: the cluster was formatted anew, or it is another one. Nobody will ask
        for its ids again, unless a mount has them that runs, or that is just being replaced."""
        path_hash = self.namespace.rsplit(".", 2)[1]
        with begin(self._environment, write=True) as txn:
            with txn.cursor() as cursor:
                tables = [key.decode() for key, _ in cursor if b"/" in key]
            for table in tables:
                other, other_hash, _ = table.split("/")[0].rsplit(".", 2)
                if other == cluster_id or other_hash != path_hash:
                    continue
                if state_folder.is_abandoned(self._folder, table.split("/")[0], boot):
                    log.info("metadata of another cluster is dropped", table=table)
                    txn.drop(self._environment.open_db(table.encode(), txn=cast(lmdb.Transaction, txn)), delete=True)

    def _open_tables(self) -> Tables:
        with self._environment.begin(write=True) as txn:
            return Tables(
                *(self._environment.open_db(f"{self.namespace}/{table}".encode(), txn=txn) for table in TABLES)
            )


class _Shared(NamedTuple):
    environment: lmdb.Environment
    users: int


# LMDB must not be opened twice in one process (closing one would drop the other's file locks): stores over the
# same folder share the environment.
_shared: dict[Path, _Shared] = {}
_sharing = threading.Lock()


def _share_environment(folder: Path, map_bytes: int, boot: str) -> lmdb.Environment:
    key = folder.resolve()
    with _sharing:
        shared = _shared.get(key)
        if shared is None:
            if state_folder.torn(folder, boot):
                log.warning("metadata of an unclean stop is dropped", folder=str(folder))
                _wipe(folder)
            shared = _Shared(_open_checked(folder, map_bytes), 0)
        _shared[key] = shared._replace(users=shared.users + 1)
        return shared.environment


def _drop_environment(folder: Path) -> None:
    key = folder.resolve()
    with _sharing:
        shared = _shared.pop(key)
        if shared.users > 1:
            _shared[key] = shared._replace(users=shared.users - 1)
        else:
            shared.environment.close()


def _open_checked(folder: Path, map_bytes: int) -> lmdb.Environment:
    """Open; what is unreadable or has another format is wiped and made anew."""
    try:
        environment = _open(folder, map_bytes)
        with environment.begin(write=True) as txn:
            found = txn.get(b"format")
            if found is None and txn.stat()["entries"] == 0:
                txn.put(b"format", FORMAT)
                found = FORMAT
        if found == FORMAT:
            return environment
        environment.close()
        log.warning("metadata of an unknown format is dropped", folder=str(folder), found=repr(found))
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as exc:
        log.warning("unreadable metadata is dropped", folder=str(folder), error=str(exc))
    _wipe(folder)
    environment = _open(folder, map_bytes)
    with environment.begin(write=True) as txn:
        txn.put(b"format", FORMAT)
    return environment


def _open(folder: Path, map_bytes: int) -> lmdb.Environment:
    # No fsync (state_folder tells a torn file), no read-ahead (look-ups are random), never WRITEMAP: on a full
    # disk it would answer with SIGBUS instead of an error.
    return lmdb.open(
        str(folder / FILE_NAME),
        subdir=False,
        map_size=map_bytes,
        max_dbs=MAX_TABLES,
        max_readers=MAX_READERS,
        max_spare_txns=16,
        sync=False,
        metasync=False,
        readahead=False,
        mode=0o600,
    )


def _wipe(folder: Path) -> None:
    for path in (folder / FILE_NAME, folder / f"{FILE_NAME}-lock"):
        path.unlink(missing_ok=True)
    for claim in folder.glob("*.claim"):
        if not state_folder.claimed(folder, claim.name.removesuffix(".claim")):
            claim.unlink()
