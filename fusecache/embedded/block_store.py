"""The block files of one block worker, laid out as Alluxio lays them out.

`<tier>/alluxioworker/<block id>` is a complete block; `<tier>/alluxioworker/.tmp_blocks/<session>-<block id>`
one that is being written. A file gets its final name by rename only when it is whole, so a name with the
right length is a complete block, and clients may open it without asking.

A block that is a whole source file on the same file system is a hard link to it: no copy, no space. A link
shares later changes of the source, so its length, modification and change time (`link_times`) are compared
before each use, and on any difference the link is dropped.
Everything else is a copy, made inside the kernel (copy_file_range), which shares extents where it can.

Capacity counts copies and links alike, as a block worker would; the least recently used blocks go first. Where the
disk is nearly full no copy is made at all: the bytes are served, and the disk is left to its owner.
Thread-safe. Does not know files or paths of the source: callers hand it descriptors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import structlog

from fusecache.embedded.link_times import LinkTimes
from fusecache.errors import Unavailable

log = structlog.get_logger(__name__)


class BlockFile(NamedTuple):
    """What was true of a block file when it was committed."""

    length: int
    link: bool
    mtime_ns: int


class BlockStore:
    """Blocks of one tier folder."""

    def __init__(
        self,
        tier: Path,
        *,
        capacity_bytes: int,
        keep_free_bytes: int = 0,
        link_times: LinkTimes | None,
        expected: Callable[[int], tuple[int, int] | None],
    ) -> None:
        """Take over what an earlier run left in `tier`. Without `link_times` every block is a copy.

        No copy is made that would leave less than `keep_free_bytes` on the file system.

        `expected` gives (length, source mtime_ns) of a block id that is still current: other block files are
        removed, as are temporary ones.
        """
        self.tier = tier
        self.folder = tier / "alluxioworker"
        self._temporary = self.folder / ".tmp_blocks"
        self.capacity_bytes = capacity_bytes
        self._keep_free_bytes = keep_free_bytes
        self._link_times = link_times
        self._blocks: OrderedDict[int, BlockFile] = OrderedDict()
        self._writing: set[int] = set()
        self._used_bytes = 0
        self._sessions = count(1)
        self._lock = threading.RLock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(exist_ok=True)
        self._device = self.folder.stat().st_dev
        self._take_over(expected)

    @property
    def used_bytes(self) -> int:
        """Bytes of all complete blocks."""
        return self._used_bytes

    def path(self, block_id: int) -> Path:
        """Where a complete block lies (or would)."""
        return self.folder / str(block_id)

    def holds(self, block_id: int) -> bool:
        """Whether a complete block is there; counts as no use, and does not recheck links."""
        return block_id in self._blocks

    def length(self, block_id: int) -> int | None:
        """Length of a complete block, None when it is not held."""
        found = self._blocks.get(block_id)
        return None if found is None else found.length

    def open(self, block_id: int) -> tuple[int, int] | None:
        """(descriptor, length) of a complete block, which becomes the most recently used; None when not held."""
        with self._lock:
            known = self._blocks.get(block_id)
            if known is None:
                return None
            try:
                descriptor = os.open(self.path(block_id), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self.remove(block_id)
                return None
            if not self._still_true(known, os.fstat(descriptor)):
                os.close(descriptor)
                self.remove(block_id)
                return None
            self._blocks.move_to_end(block_id)
            return descriptor, known.length

    def recheck(self, block_id: int) -> None:
        """Drop the block if it is a link whose source changed."""
        opened = self.open(block_id)
        if opened is not None:
            os.close(opened[0])

    def remove(self, block_id: int) -> bool:
        """Delete a block; open descriptors of it live on. True when it was held."""
        with self._lock:
            known = self._blocks.pop(block_id, None)
            if known is None:
                return False
            self._used_bytes -= known.length
            try:
                self._unlink(self.path(block_id), known.link)
            except FileNotFoundError:
                log.warning("block file was removed by somebody else", path=str(self.path(block_id)))
            return True

    def block_ids(self) -> list[int]:
        """All complete blocks, least recently used first."""
        with self._lock:
            return list(self._blocks)

    def writer(self, block_id: int, length: int, *, copy: bool = True) -> BlockWriter | None:
        """A temporary block to fill (or, unless `copy`, to link).

        None when the block is held, being written, larger than the tier, or there is no disk space to spare.
        """
        if copy and shutil.disk_usage(self._temporary).free < length + self._keep_free_bytes:
            return None
        with self._lock:
            if block_id in self._blocks or block_id in self._writing or length > self.capacity_bytes:
                return None
            self._writing.add(block_id)
            path = self._temporary / f"{next(self._sessions)}-{block_id}"
        return BlockWriter(self, block_id, length, path)

    def may_link(self, source: os.stat_result, offset: int, length: int) -> bool:
        """Whether a block is a whole source file that can be linked instead of copied."""
        return (
            self._link_times is not None
            and offset == 0
            and length == source.st_size
            and source.st_dev == self._device
            and not source.st_mode & (stat.S_ISUID | stat.S_ISGID)
        )

    def add_link(self, block_id: int, source: int, before: os.stat_result) -> bool:
        """Commit a block as a hard link to the open source file; False when it can't be one.

        `before` is what the file was when the caller began to read it: if it changed since, it is no block.
        """
        if self._link_times is None:
            return False
        writer = self.writer(block_id, before.st_size, copy=False)
        if writer is None:
            return self.holds(block_id)
        try:
            with self._link_times.changing(source, +1):
                # The descriptor, not the name, is linked: what was read is what becomes the block.
                # src_dir_fd, unused with an absolute path, makes Python call linkat: its link() does not follow.
                os.link(f"/proc/self/fd/{source}", writer.path, src_dir_fd=source, follow_symlinks=True)
        except OSError:
            # Other file system, protected_hardlinks, no more links: a copy will do.
            writer.abandon()
            return False
        writer.commit_link()
        self.recheck(block_id)
        after = os.fstat(source)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            self.remove(block_id)
        return self.holds(block_id)

    def copy(self, block_id: int, source: int, offset: int, length: int) -> bool:
        """Commit a block as link or copy of a piece of an open source file.

        True when the block is held afterwards. Unavailable when the source is shorter than the block.
        """
        found = os.fstat(source)
        if self.may_link(found, offset, length) and self.add_link(block_id, source, found):
            return True
        writer = self.writer(block_id, length)
        if writer is None:
            return self.holds(block_id)
        try:
            copied = writer.fill(source, offset)
        except BaseException:
            writer.abandon()
            raise
        if copied < length:
            writer.abandon()
            raise Unavailable(f"Failed to read block {block_id} from UFS: it ends {length - copied} bytes early")
        return writer.commit(mtime_ns=os.fstat(source).st_mtime_ns)

    # -- for BlockWriter -----------------------------------------------------------------------------------

    def _commit(self, block_id: int, temporary: Path, found: os.stat_result, link: bool) -> None:
        with self._lock:
            self._make_room(found.st_size)
            if link and self._link_times is not None:
                # ext4 moves the change time of a renamed file too.
                descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    with self._link_times.changing(descriptor, 0):
                        temporary.rename(self.path(block_id))
                finally:
                    os.close(descriptor)
            else:
                temporary.rename(self.path(block_id))
            self._writing.discard(block_id)
            self._blocks[block_id] = BlockFile(found.st_size, link, found.st_mtime_ns)
            self._used_bytes += found.st_size

    def _release(self, block_id: int) -> None:
        with self._lock:
            self._writing.discard(block_id)

    # -- inside --------------------------------------------------------------------------------------------

    def _make_room(self, needed: int) -> None:
        while self._blocks and self._used_bytes + needed > self.capacity_bytes:
            self.remove(next(iter(self._blocks)))

    def _unlink(self, path: Path, link: bool) -> None:
        if not link or self._link_times is None:
            path.unlink()
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._link_times.changing(descriptor, -1):
                path.unlink()
        finally:
            os.close(descriptor)

    def _still_true(self, known: BlockFile, found: os.stat_result) -> bool:
        if found.st_size != known.length:
            return False
        if not known.link:
            return True
        return found.st_mtime_ns == known.mtime_ns and self._link_times is not None and self._link_times.trusted(found)

    def _take_over(self, expected: Callable[[int], tuple[int, int] | None]) -> None:
        for leftover in self._temporary.iterdir():
            leftover.unlink()
        for block_id, path, found in self._files():
            current = expected(block_id)
            # A link has its source's modification time, a copy was given it (BlockWriter.commit).
            if current is None or (found.st_size, found.st_mtime_ns) != current:
                path.unlink()
                continue
            link = found.st_nlink > 1
            if link and self._link_times is None:
                path.unlink()
                continue
            if link and self._link_times is not None:
                self._link_times.adopt(found)
            self._blocks[block_id] = BlockFile(found.st_size, link, found.st_mtime_ns)
            self._used_bytes += found.st_size

    def _files(self) -> Iterator[tuple[int, Path, os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.isascii() and entry.name.isdigit() and entry.is_file(follow_symlinks=False):
                    yield int(entry.name), Path(entry.path), entry.stat(follow_symlinks=False)


class BlockWriter:
    """A temporary block; ends in `commit` or `abandon`."""

    def __init__(self, store: BlockStore, block_id: int, length: int, path: Path) -> None:
        self.path = path
        self._store = store
        self._block_id = block_id
        self._length = length
        self._descriptor = -1

    def write(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._opened(), view) :]

    def fill(self, source: int, offset: int) -> int:
        """Copy the block's length from an open file, inside the kernel; the number of bytes there were."""
        target = self._opened()
        done = 0
        while done < self._length:
            moved = os.copy_file_range(source, target, self._length - done, offset + done, done)
            if moved == 0:
                break
            done += moved
        return done

    def commit(self, *, mtime_ns: int) -> bool:
        """Give a copy its final name if it is whole; False (and gone) when its length is not the block's.

        `mtime_ns` is the source's: a restart knows by it which content was copied.
        """
        descriptor = self._opened()
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        os.close(descriptor)
        self._descriptor = -1
        return self._finish(link=False)

    def commit_link(self) -> bool:
        """Give a hard link that was made at `path` its final name."""
        return self._finish(link=True)

    def _finish(self, *, link: bool) -> bool:
        found = self.path.lstat()
        if found.st_size != self._length:
            self.abandon()
            return False
        self._store._commit(self._block_id, self.path, found, link)
        return True

    def _opened(self) -> int:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        return self._descriptor

    def abandon(self) -> None:
        """Remove the temporary file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._store._release(self._block_id)
