"""Which worker gets which request, and what happens to the requests of one that died. Pure: the time is an argument.

A worker may be given a request while it has *credits*: it owes fewer READs than it has slots, fewer other requests
than MOST_OTHERS (counted apart: look-ups that wait for a master that restarts must not hold up reads), and it is
awake. Awake means: it answered within STALL_S, or owes nothing, or has taken everything out of its socket (asked only
when in doubt: an ioctl). Without that rule one worker blocked for 4 s stalled all 8 clients for 3.8 s. A READ goes to
the worker that read the inode last, which has its file open and its read-ahead running; other requests to the one
that owes least.

A request stays here until it is answered: when its worker dies it is given to another one. The third death of a worker
that held it answers it EIO, because it may be what kills them (one such request killed 23 workers in 7 s). Its last
delivery is to a worker that holds nothing else, so that no other request is blamed with it. It waits apart from the
others, and one worker gets nothing new until it is free: there would be none for as long as others ask for more.

Does not send, receive or wait.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from fusecache.kernel import wire

STALL_S: Final = 0.020
"""Longer than a worker decodes a large listing without looking at its socket on a quiet machine."""
MOST_OTHERS: Final = 48
"""Requests but READs that one worker holds; pyfuse3 serves 99 at once, READs included."""
MOST_DELIVERIES: Final = 3
MOST_REMEMBERED: Final = 1 << 16
"""Inodes whose last worker is known; forgotten oldest first."""


class Request:
    """A request that waits for a worker, or for its answer."""

    __slots__ = ("answered", "deliveries", "holders", "inode", "message", "opcode", "taken_at_s", "unique")

    def __init__(self, opcode: int, unique: int, inode: int, message: bytes, taken_at_s: float = 0.0) -> None:
        self.opcode = opcode
        self.unique = unique
        self.inode = inode
        self.message = message
        self.taken_at_s = taken_at_s
        """When it was taken from the kernel."""
        self.deliveries = 0
        self.holders = 0
        """Workers that owe an answer: 0 while it waits, 2 when it was given to a second one."""
        self.answered = False


class Load:
    """What one worker owes."""

    def __init__(self, index: int, most_reads: int) -> None:
        self.index = index
        self.most_reads = most_reads
        self.reads = 0
        """How many of the owed ones are READs."""
        self.owed: dict[int, Request] = {}
        """Unique -> request; in the order of sending."""
        self.ready = False
        """It answered INIT, and lives."""
        self.full = False
        """Its socket took no more; until its next answer, or the next look at its socket."""
        self.alone = False
        """Holds one suspicious request and gets no other."""
        self.awake_at_s = 0.0
        """When it last showed that it takes requests out of its socket."""
        self.heard_at_s = 0.0
        """When it last answered, was given a request while it owed none, or was nudged."""


class InFlight:
    """All workers' loads and the requests that wait for one."""

    def __init__(self, has_unread: Callable[[Load], bool]) -> None:
        """`has_unread` says whether a worker's socket still holds something it has not taken out."""
        self._has_unread = has_unread
        self.loads: dict[int, Load] = {}
        self.waiting_reads: deque[Request] = deque()
        self.waiting_others: deque[Request] = deque()
        self.waiting_last: deque[Request] = deque()
        """For their last delivery."""
        self._kept_free: Load | None = None
        self._kept_for: Request | None = None
        """Whose last delivery a worker is kept free for."""
        self._last_reader: dict[int, int] = {}
        self.owed = 0
        """Requests that workers hold, twice those that two hold."""
        self.redelivered = 0
        self.poisoned = 0

    def choose(self, request: Request, now_s: float) -> Load | None:
        """The worker to give it to; None: nobody has credits (or, for a last delivery, nobody is free)."""
        is_read = request.opcode == wire.READ
        if is_read:
            index = self._last_reader.get(request.inode)
            if index is not None:
                load = self.loads.get(index)
                if load is not None and self._has_credits(load, request, is_read, now_s):
                    return load
        best = None
        least = 1 << 30
        for load in self.loads.values():
            if len(load.owed) < least and self._has_credits(load, request, is_read, now_s):
                best = load
                least = len(load.owed)
        if best is None and request.deliveries == MOST_DELIVERIES - 1:
            self._keep_one_free(request, now_s)
        return best

    def _keep_one_free(self, request: Request, now_s: float) -> None:
        """Let a worker come to an end with what it holds, for `request`. One at a time: others are to be served too."""
        self._kept_for = request
        able = [load for load in self.loads.values() if load.ready and not load.alone and self._is_awake(load, now_s)]
        if len(self.loads) > 1 and any(load.alone for load in self.loads.values()):
            self._kept_free = None
        elif self._kept_free not in able:
            self._kept_free = min(able, key=lambda load: len(load.owed), default=None)

    def _has_credits(self, load: Load, request: Request, is_read: bool, now_s: float) -> bool:
        owed = load.owed
        if not load.ready or load.full or load.alone or request.unique in owed:
            return False
        if load is self._kept_free and self._is_kept_from(request):
            return False
        if not owed:
            return True
        if request.deliveries == MOST_DELIVERIES - 1:
            return False
        if load.reads >= load.most_reads if is_read else len(owed) - load.reads >= MOST_OTHERS:
            return False
        return self._is_awake(load, now_s)

    def _is_kept_from(self, request: Request) -> bool:
        kept_for = self._kept_for
        return kept_for is not None and kept_for is not request and not kept_for.answered

    def _is_awake(self, load: Load, now_s: float) -> bool:
        if now_s - load.awake_at_s < STALL_S:
            return True
        if self._has_unread(load):
            return False
        load.awake_at_s = now_s
        return True

    def given(self, request: Request, load: Load, now_s: float) -> None:
        """The request is in the worker's socket."""
        if request is self._kept_for:
            self._kept_free = self._kept_for = None
        if not load.owed:
            load.awake_at_s = load.heard_at_s = now_s
        load.owed[request.unique] = request
        self.owed += 1
        request.holders += 1
        request.deliveries += 1
        if request.deliveries == MOST_DELIVERIES:
            load.alone = True
        if request.opcode == wire.READ:
            load.reads += 1
            readers = self._last_reader
            if readers.get(request.inode) != load.index:
                readers[request.inode] = load.index
                if len(readers) > MOST_REMEMBERED:
                    for inode in list(itertools.islice(readers, MOST_REMEMBERED // 8)):
                        del readers[inode]

    def answer_of(self, load: Load, unique: int, now_s: float) -> Request | None:
        """The request that a worker's answer is for; None when it owes no such answer, or another one gave it."""
        request = load.owed.pop(unique, None)
        if request is None:
            return None  # which shows nothing: who talks without being asked need not have read a thing
        load.awake_at_s = load.heard_at_s = now_s
        load.full = False
        self.owed -= 1
        if request.opcode == wire.READ:
            load.reads -= 1
        if load.alone and not load.owed:
            load.alone = False
        request.holders -= 1
        if request.answered:
            return None
        request.answered = True
        return request

    def take_back(self, load: Load, request: Request) -> None:
        """What `answer_of` gave out was no answer: the worker owes it still."""
        request.answered = False
        request.holders += 1
        load.owed[request.unique] = request
        self.owed += 1
        if request.opcode == wire.READ:
            load.reads += 1

    def died(self, load: Load) -> tuple[list[Request], list[Request]]:
        """A worker is gone: (requests to be given to another one, requests to be answered EIO), oldest first."""
        load.ready = False
        if self.loads.get(load.index) is load:
            del self.loads[load.index]
        again, poisoned = [], []
        for request in load.owed.values():
            request.holders -= 1
            if request.answered or request.holders:
                continue
            if request.deliveries >= MOST_DELIVERIES:
                request.answered = True
                poisoned.append(request)
            else:
                again.append(request)
        self.owed -= len(load.owed)
        load.owed.clear()
        load.reads = 0
        self.redelivered += len(again)
        self.poisoned += len(poisoned)
        return again, poisoned

    def wait_first(self, requests: Iterable[Request]) -> None:
        """Put requests (oldest first) before all that wait."""
        for request in reversed(list(requests)):
            self.queue_of(request).appendleft(request)

    def queue_of(self, request: Request) -> deque[Request]:
        """Where a request waits for credits: in turn, READs apart from the others, and last deliveries from both."""
        if request.deliveries == MOST_DELIVERIES - 1:
            return self.waiting_last
        return self.waiting_reads if request.opcode == wire.READ else self.waiting_others

    @property
    def queues(self) -> tuple[deque[Request], ...]:
        """All that wait for credits, by what they wait for."""
        return self.waiting_last, self.waiting_reads, self.waiting_others

    @property
    def waiting(self) -> int:
        """Requests that wait for credits."""
        return len(self.waiting_reads) + len(self.waiting_others) + len(self.waiting_last)

    def overdue(self, now_s: float, after_s: float) -> list[Request]:
        """Requests that a worker has left unread in its socket for so long that another one shall get them too.

        Which of its requests it has not read can't be seen: all that it owes are meant, the first answer counts.
        They are still owed by the first worker, whose slot and credit stay taken until it answers.
        """
        late: list[Request] = []
        for load in self.loads.values():
            if load.owed and load.ready and now_s - load.awake_at_s >= after_s:
                if self._has_unread(load):
                    late.extend(
                        request
                        for request in load.owed.values()
                        if request.holders == 1 and not request.answered and request.deliveries == 1
                    )
                else:
                    load.awake_at_s = now_s
        return late

    def quiet(self, now_s: float, after_s: float) -> list[Load]:
        """Workers that owe something and have not been heard of for so long: each is named once in that time.

        One that has taken all its requests and then hangs would not be noticed by what lies unread in its socket.
        """
        quiet = [load for load in self.loads.values() if load.owed and now_s - load.heard_at_s >= after_s]
        for load in quiet:
            load.heard_at_s = now_s
        return quiet

    def taken_before(self, moment_s: float) -> list[Request]:
        """Requests taken from the kernel before that time, and not answered; each once."""
        found: dict[int, Request] = {}
        for load in self.loads.values():
            found.update(load.owed)
        found.update((request.unique, request) for queue in self.queues for request in queue)
        return [request for request in found.values() if request.taken_at_s < moment_s and not request.answered]

    def give_up(self, request: Request) -> None:
        """It is answered without a worker; what one that holds it answers is dropped."""
        request.answered = True
        with contextlib.suppress(ValueError):
            self.queue_of(request).remove(request)

    def unread_s(self, load: Load, now_s: float) -> float:
        """For how long a worker has left its socket unread; 0 while it takes what it is given."""
        return now_s - load.awake_at_s if load.owed and self._has_unread(load) else 0.0

    def unanswered(self, opcodes: frozenset[int], inode: int) -> list[Request]:
        """Requests for an inode that wait or are owed. Any thread (each copy of a collection is one step)."""
        loads = list(self.loads.values())
        requests = [request for queue in self.queues for request in queue.copy()]
        for load in loads:
            requests.extend(list(load.owed.values()))
        return [
            request
            for request in requests
            if request.inode == inode and request.opcode in opcodes and not request.answered
        ]

    def all_unanswered(self) -> list[Request]:
        """Whatever waits or is owed, once each, in the order in which it came."""
        requests = [request for queue in self.queues for request in queue]
        for load in self.loads.values():
            requests.extend(load.owed.values())
        found = {request.unique: request for request in requests if not request.answered}
        return sorted(found.values(), key=lambda request: request.taken_at_s)

    @property
    def is_busy(self) -> bool:
        """Something waits, or is owed."""
        if self.waiting_reads or self.waiting_others or self.waiting_last:
            return True
        return bool(self.owed)
