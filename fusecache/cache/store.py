"""Metadata on the node's disk: LMDB tables per cluster, read without locks, written by one thread.

A kernel request reads here in one short read transaction (`read`); a listing is put in by `cache.listing`
through `writer`. The tables of one namespace (cluster id + mounted path, so that equal ids of two clusters, or
of two mounts with different roots, never meet):

    folders   folder inode     -> FolderState: the shelf its entries lie on, when it was listed
    children  (shelf, inode)   -> record                  ordered by inode: pages of readdir
    names     (shelf, name)    -> inode                   look-ups
    parents   inode            -> folder inode            from an inode to its record, and to its path
    retired   shelf            -> folder inode            shelves to sweep
    meta      format, next shelf

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
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, cast

import lmdb
import structlog

from fusecache import clock
from fusecache.cache import record, state_folder
from fusecache.cache.record import Entry
from fusecache.cache.transaction import Transaction, begin, reader_of
from fusecache.cache.writer import StoreWriter
from fusecache.errors import StateError
from fusecache.private_folder import prepare_private_folder

log = structlog.get_logger(__name__)

FORMAT: Final = b"fusecache-metadata-2"
"""Layout of the tables; another one is dropped. Records carry their own version."""

TABLES: Final = ("folders", "children", "names", "parents", "retired", "meta")

_ID: Final = struct.Struct(">Q")  # big-endian: keys sort as numbers
_PAIR: Final = struct.Struct(">QQ")
_STATE: Final = struct.Struct("<Q8sdIQ")
_MAX_TABLES: Final = 6 * 64
_MAX_READERS: Final = 510
_MAX_MOUNTS: Final = 16


class FolderState(NamedTuple):
    """What the store knows about a listed folder."""

    shelf: int
    boot: bytes
    """Which boot `asked_at` belongs to (`MetadataStore.boot`)."""
    asked_at: float
    """CLOCK_BOOTTIME when its listing was asked for."""
    incomplete: int
    """Files of the listing that were incomplete and therefore are not on the shelf."""
    entries: int
    """Complete entries on the shelf."""


class Tables(NamedTuple):
    """Database handles of one namespace."""

    folders: lmdb._Database
    children: lmdb._Database
    names: lmdb._Database
    parents: lmdb._Database
    retired: lmdb._Database
    meta: lmdb._Database


def id_key(number: int) -> bytes:
    """Key of an inode or shelf."""
    return _ID.pack(number)


def child_key(shelf: int, inode: int) -> bytes:
    """Key in `children`."""
    return _PAIR.pack(shelf, inode)


def name_key(shelf: int, name: bytes) -> bytes:
    """Key in `names`."""
    return _ID.pack(shelf) + name


def id_of(key: bytes) -> int:
    """The number in an 8-byte key or value."""
    number: int = _ID.unpack(key)[0]
    return number


def pack_state(state: FolderState) -> bytes:
    """Value in `folders`."""
    return _STATE.pack(*state)


class MetadataStore:
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
        self.boot: Final = hashlib.blake2b(boot.encode(), digest_size=8).digest()
        self.held_shelves: Final[set[int]] = set()
        """Shelves somebody still builds or compares; the sweeper leaves them alone."""
        self._folder = folder
        self._closed = False
        prepare_private_folder(folder)
        with state_folder.opening(folder):
            self._claim = self._claim_namespace(cluster_id, root_path, boot)
            try:
                self._environment = _share_environment(folder, map_bytes, boot)
                try:
                    self._claim.mark_open()
                    self._drop_other_clusters(cluster_id)
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
        self.read: Final = reader_of(self._environment)
        """Starts a read transaction (a context manager); keep it short, LMDB can't reuse pages it sees."""

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

    # ---- reading: each call takes the transaction, so that one request sees one state ----

    def folder_state(self, txn: Transaction, inode: int) -> FolderState | None:
        """State of a listed folder, None when it was never listed (or is gone)."""
        packed = txn.get(_ID.pack(inode), db=self.tables.folders)
        return None if packed is None else FolderState(*_STATE.unpack(packed))

    def parent_of(self, txn: Transaction, inode: int) -> int | None:
        """The folder whose listing named `inode` last."""
        packed = txn.get(_ID.pack(inode), db=self.tables.parents)
        return None if packed is None else id_of(packed)

    def child(self, txn: Transaction, folder: int, shelf: int, name: bytes) -> Entry | None:
        """The entry called `name` on a folder's shelf."""
        prefix = _ID.pack(shelf)
        packed = txn.get(prefix + name, db=self.tables.names)
        if packed is None:
            return None
        found = txn.get(prefix + packed, db=self.tables.children)
        return None if found is None else record.decode(id_of(packed), folder, found)

    def on_shelf(self, txn: Transaction, folder: int, shelf: int, inode: int) -> Entry | None:
        """The entry with `inode` on a folder's shelf."""
        found = txn.get(_PAIR.pack(shelf, inode), db=self.tables.children)
        return None if found is None else record.decode(inode, folder, found)

    def entry(self, txn: Transaction, inode: int) -> Entry | None:
        """The entry with `inode`, wherever it lies; None when no current listing has it."""
        key = _ID.pack(inode)
        parent = txn.get(key, db=self.tables.parents)
        if parent is None:
            return None
        state = txn.get(parent, db=self.tables.folders)
        if state is None:
            return None
        found = txn.get(_ID.pack(_STATE.unpack(state)[0]) + key, db=self.tables.children)
        return None if found is None else record.decode(inode, id_of(parent), found)

    def page(self, txn: Transaction, folder: int, shelf: int, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries of a shelf with inode > `after`, ordered by inode."""
        entries: list[Entry] = []
        for inode, found in self.records(txn, shelf, after):
            entries.append(record.decode(inode, folder, found))
            if len(entries) >= limit:
                break
        return entries

    def records(self, txn: Transaction, shelf: int, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """(inode, record) of a shelf with inode > `after`, ordered by inode."""
        prefix = _ID.pack(shelf)
        with txn.cursor(db=self.tables.children) as cursor:
            if cursor.set_range(_PAIR.pack(shelf, after + 1)):
                for key, found in cursor:
                    if not key.startswith(prefix):
                        return
                    yield id_of(key[8:]), found

    def by_name(self, txn: Transaction, folder: int, shelf: int) -> Iterator[Entry]:
        """Every entry of a shelf, ordered by name."""
        prefix = _ID.pack(shelf)
        with txn.cursor(db=self.tables.names) as cursor:
            if cursor.set_range(prefix):
                for key, packed in cursor:
                    if not key.startswith(prefix):
                        return
                    entry = self.on_shelf(txn, folder, shelf, id_of(packed))
                    if entry is not None:
                        yield entry

    def entry_count(self) -> int:
        """Entries remembered, over all folders."""
        with self.read() as txn:
            return txn.stat(self.tables.parents)["entries"]

    def size_bytes(self) -> int:
        """Disk used by the whole file (all namespaces)."""
        return os.stat(self._folder / _FILE_NAME).st_blocks * 512

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
        shelf = id_of(txn.get(b"next_shelf", _ID.pack(1), db=self.tables.meta))
        txn.put(b"next_shelf", _ID.pack(shelf + 1), db=self.tables.meta)
        return shelf

    @property
    def namespace(self) -> str:
        """Prefix of this store's tables: cluster, mounted path, and a number when it is mounted several times."""
        return self._claim.namespace

    def _claim_namespace(self, cluster_id: str, root_path: bytes, boot: str) -> state_folder.Claim:
        # Each mount of one source has a set of tables of its own: hot entries of one process would not notice
        # what another writes. The lowest free number is taken, so that a restart finds its tables again.
        base = f"{cluster_id}.{hashlib.blake2b(root_path, digest_size=8).hexdigest()}"
        for number in range(_MAX_MOUNTS):
            claim = state_folder.try_claim(self._folder, f"{base}.{number}", boot)
            if claim is not None:
                return claim
        raise StateError(f"{_MAX_MOUNTS} mounts of one source already keep their metadata in {self._folder}")

    def _drop_other_clusters(self, cluster_id: str) -> None:
        """Another cluster id for the same path: the cluster was formatted anew, or it is another one. Either way
        nobody will ask for its ids again, unless a mount that runs now does."""
        path_hash = self.namespace.rsplit(".", 2)[1]
        with begin(self._environment, write=True) as txn:
            with txn.cursor() as cursor:
                tables = [key.decode() for key, _ in cursor if b"/" in key]
            for table in tables:
                other, other_hash, _ = table.split("/")[0].rsplit(".", 2)
                if other == cluster_id or other_hash != path_hash:
                    continue
                if not state_folder.claimed(self._folder, table.split("/")[0]):
                    log.info("metadata of another cluster is dropped", table=table)
                    txn.drop(self._environment.open_db(table.encode(), txn=cast(lmdb.Transaction, txn)), delete=True)

    def _open_tables(self) -> Tables:
        with self._environment.begin(write=True) as txn:
            return Tables(
                *(self._environment.open_db(f"{self.namespace}/{table}".encode(), txn=txn) for table in TABLES)
            )


_FILE_NAME: Final = "metadata.lmdb"


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
        str(folder / _FILE_NAME),
        subdir=False,
        map_size=map_bytes,
        max_dbs=_MAX_TABLES,
        max_readers=_MAX_READERS,
        max_spare_txns=16,
        sync=False,
        metasync=False,
        readahead=False,
        mode=0o600,
    )


def _wipe(folder: Path) -> None:
    for path in (folder / _FILE_NAME, folder / f"{_FILE_NAME}-lock"):
        path.unlink(missing_ok=True)
    for claim in folder.glob("*.claim"):
        if not state_folder.claimed(folder, claim.name.removesuffix(".claim")):
            claim.unlink()
