"""Files that hold an inode's bytes, or a block's, one to one: what workers hand in, and what is known of it afterwards.

An unprivileged worker hands in a descriptor, and from then on its file is read with the gate's rights: by the kernel
(`opens`) or by the gate (`direct_reads`). So only what the worker could read itself is accepted: a
regular file, opened exactly O_RDONLY (an O_PATH descriptor let another uid read a root 0600 file), without a second
name (through which somebody might write to it), on a file system where caches or tiers lie, and never on the mount that
is served here: the gate would wait for its own answer. So what a descriptor's file system is comes first, and is found
out without asking that (`quiet_stat`).

An accepted file is *learned*: its path and what fstat said. It is opened again later only if every one of these values
is still the same; block files are written once, under a name of their own.

When the agent invalidates an inode, what was learned of it is forgotten, and what was offered because of a request that
is older than that is not learned any more: it may be the version before.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import stat
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from fusecache.kernel.gate.quiet_stat import device_of
from fusecache.kernel.offers import Offered

MOST_LEARNED: Final = 1 << 18
"""Inodes; about 400 bytes each. The oldest go first."""
MOST_REMEMBERED: Final = 1 << 16
"""Inodes forgotten, and blocks read unseen by workers since the agent last asked."""
_O_LARGEFILE: Final = 0o100000
"""Set in F_GETFL by open(2) on 64-bit machines; Python's os.O_LARGEFILE is 0 there."""
_OURS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What says nothing about the file: a worker answers meanwhile, and the file is still known afterwards."""
_HARMLESS_FLAGS: Final = _O_LARGEFILE | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LearnedFile(NamedTuple):
    """What backs an inode, as it was when it was handed in."""

    path: bytes
    device: int
    file_inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """With it, a new file that got the number of a deleted one can't be taken for it."""


class LearnedBlocks(NamedTuple):
    """What backs an inode of several blocks, as far as it was handed in."""

    block_bytes: int
    files: dict[int, LearnedFile]
    """By the block's index."""


class OpenedFile(NamedTuple):
    """A new descriptor of a learned file, the caller's to close."""

    descriptor: int
    size: int
    block_index: int = 0


def _identity(path: bytes, status: os.stat_result) -> LearnedFile:
    return LearnedFile(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class LearnedFiles:
    """Inode -> file. One thread, but for the two methods that say so."""

    def __init__(
        self, allowed_devices: frozenset[int] | None, clock: Callable[[], float], own_device: int | None = None
    ) -> None:
        """`allowed_devices`: st_dev of cache and tier folders; None: any but `own_device`, the mount's."""
        self._allowed_devices = allowed_devices
        self._own_device = own_device
        self._clock = clock
        self._files: dict[int, LearnedFile] = {}
        self._blocks: dict[int, LearnedBlocks] = {}
        self._block_count = 0
        self.refusals: Counter[str] = Counter()
        """Reason -> how often a file was not taken, or a learned one was forgotten because of what it is now."""
        self._to_forget: list[int] = []
        self._forgotten_at_s: dict[int, float] = {}
        self._all_forgotten_at_s = -math.inf
        """Every inode counts as forgotten then: there were too many to remember."""
        self._unseen: dict[tuple[int, int], None] = {}
        self.on_forgotten: Callable[[int], None] | None = None
        """Called by `settle_forgotten` for each inode."""

    def __len__(self) -> int:
        return len(self._files) + self._block_count

    def _lies_elsewhere(self, descriptor: int) -> bool:
        device = device_of(descriptor)
        return device == self._own_device or (self._allowed_devices is not None and device not in self._allowed_devices)

    @staticmethod
    def _refusal_of(descriptor: int, status: os.stat_result) -> str | None:
        """Why this descriptor may not be used; None: it may."""
        if not stat.S_ISREG(status.st_mode):
            return "not_regular"
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_HARMLESS_FLAGS != os.O_RDONLY:
            return "not_read_only"
        if status.st_nlink != 1:
            # 0: evicted since. Its bytes are right, but its space could not be freed for as long as it is registered.
            return "not_one_name"
        return None

    def learn(self, inode: int, offered: Offered, asked_at_s: float) -> bool:
        """Check a descriptor that was handed in because of a request taken at `asked_at_s`; False: not taken.

        The descriptor stays the caller's.
        """
        descriptor = offered.descriptor
        if asked_at_s <= self._forgotten_at_s.get(inode, self._all_forgotten_at_s):
            self.refusals["superseded"] += 1
            return False
        try:
            if self._lies_elsewhere(descriptor):
                self.refusals["elsewhere"] += 1
                return False
            status = os.fstat(descriptor)
            refusal = self._refusal_of(descriptor, status)
            path = os.readlink(b"/proc/self/fd/%d" % descriptor)
        except OSError as exc:
            refusal = reason_of("offer", exc)
        if refusal is not None:
            self.refusals[refusal] += 1
            return False
        if offered.block_bytes:
            self._learn_block(inode, offered, _identity(path, status))
            return True
        self._files[inode] = _identity(path, status)
        if len(self._files) > MOST_LEARNED:
            for oldest in list(itertools.islice(self._files, MOST_LEARNED // 16)):
                del self._files[oldest]
        return True

    def open(self, inode: int) -> OpenedFile | None:
        """What was learned to be the whole inode, if it is still the same file; otherwise None, and forgotten."""
        file = self._files.get(inode)
        return None if file is None else self._opened(inode, 0, file)

    def open_at(self, inode: int, offset: int) -> tuple[OpenedFile, int, int] | None:
        """As `open` what holds the byte at `offset`, where it begins in the inode, and the size of a block (0: the file
        is the whole inode)."""
        file = self._files.get(inode)
        if file is not None:
            opened = self._opened(inode, 0, file)
            return None if opened is None else (opened, 0, 0)
        blocks = self._blocks.get(inode)
        if blocks is None:
            return None
        index = offset // blocks.block_bytes
        file = blocks.files.get(index)
        if file is None:
            return None
        opened = self._opened(inode, index, file)
        return None if opened is None else (opened, index * blocks.block_bytes, blocks.block_bytes)

    def drop(self, inode: int, reason: str, index: int = 0) -> None:
        """Forget a file because of what it turned out to be."""
        self._files.pop(inode, None)
        blocks = self._blocks.get(inode)
        if blocks is not None and blocks.files.pop(index, None) is not None:
            self._block_count -= 1
            if not blocks.files:
                del self._blocks[inode]
        self.refusals[reason] += 1

    def _opened(self, inode: int, index: int, file: LearnedFile) -> OpenedFile | None:
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            reason = reason_of("learned", exc)
            if exc.errno in _OURS:
                self.refusals[reason] += 1
            else:
                self.drop(inode, reason, index)
            return None
        status = os.fstat(descriptor)
        if status.st_nlink == 1 and _identity(file.path, status) == file:
            return OpenedFile(descriptor, file.size, index)
        os.close(descriptor)
        self.drop(inode, "learned_changed", index)
        return None

    def _learn_block(self, inode: int, offered: Offered, file: LearnedFile) -> None:
        blocks = self._blocks.get(inode)
        if blocks is None or blocks.block_bytes != offered.block_bytes:
            self._forget_blocks(inode)
            blocks = self._blocks[inode] = LearnedBlocks(offered.block_bytes, {})
        self._block_count += offered.block_index not in blocks.files
        blocks.files[offered.block_index] = file
        while self._block_count > MOST_LEARNED:
            self._forget_blocks(next(iter(self._blocks)))

    def _forget_blocks(self, inode: int) -> None:
        blocks = self._blocks.pop(inode, None)
        if blocks is not None:
            self._block_count -= len(blocks.files)

    def forget(self, inode: int) -> None:
        """The inode was invalidated. Any thread; takes effect with `settle_forgotten`."""
        self._to_forget.append(inode)

    @property
    def has_forgotten(self) -> bool:
        """Whether `settle_forgotten` has something to do."""
        return bool(self._to_forget)

    def settle_forgotten(self) -> None:
        """Do what `forget` asked for."""
        now_s = self._clock()
        while self._to_forget:
            inode = self._to_forget.pop()
            self._files.pop(inode, None)
            self._forget_blocks(inode)
            self._forgotten_at_s[inode] = now_s
            if self.on_forgotten is not None:
                self.on_forgotten(inode)
        if len(self._forgotten_at_s) > MOST_REMEMBERED:
            self._forgotten_at_s.clear()
            self._all_forgotten_at_s = now_s

    def note_unseen(self, inode: int, index: int = 0) -> None:
        """A block of the inode was opened or read without a worker."""
        unseen = self._unseen
        unseen[inode, index] = None
        if len(unseen) > MOST_REMEMBERED:
            unseen.pop(next(iter(unseen)), None)

    def take_unseen(self, most: int) -> list[tuple[int, int]]:
        """Blocks (inode, index) noted since the last call, oldest first. Any thread."""
        unseen = self._unseen
        blocks: list[tuple[int, int]] = []
        while unseen and len(blocks) < most:
            try:
                block = next(iter(unseen))
                del unseen[block]
            except (RuntimeError, StopIteration, KeyError):
                # The loop changed it between the two steps: what is left is for the next call.
                break
            blocks.append(block)
        return blocks


def reason_of(what: str, exc: OSError | ValueError) -> str:
    """A refusal's name: `offer_eloop`."""
    number = exc.errno if isinstance(exc, OSError) else None
    return f"{what}_{errno.errorcode.get(number or 0, 'unknown').lower()}"
