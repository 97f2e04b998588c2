"""One retry loop for unary calls: a total budget, a deadline per try, jittered pauses that grow.

The caller gives the call (it gets the seconds of its try), and the answer to "may a second try help?"
(`alluxio.status.is_temporary`): this module knows no protocol. When the budget ends, an error is raised as it came:
that of the last try that the end did not cut short.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import tenacity

from fusecache.clock import Clock
from fusecache.rpc.budget import Budget

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""The first as Alluxio's own client has it (alluxio.user.rpc.retry.base.sleep); its longest is 3 s, which together with
the channel's reconnecting is more than the 5 s in which service has to be back."""


def pause_s(
    attempt: int, rng: random.Random, *, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S
) -> float:
    """Seconds to wait after failed try number `attempt` (1, 2, ...): doubles, between half and whole of it.

    Half of it is random so that a thousand clients of one restarted master don't come back together.
    """
    full = min(longest_s, first_s * 2.0 ** min(attempt - 1, 30))
    return full * (0.5 + 0.5 * rng.random())


def call_with_retry(
    call: Callable[[float], T],
    *,
    budget: Budget,
    try_s: float,
    is_temporary: Callable[[BaseException], bool],
    clock: Clock,
    rng: random.Random,
    on_retry: Callable[[int, BaseException], None],
) -> T:
    """`call(seconds)` until it answers, fails for good, or the budget ends.

    Then the error of the try before the last is raised, if there was one, with the last as its cause: the last one had
    the rest of the budget, a millisecond perhaps, and says little more than that ("no answer to the login" was hidden
    behind a look for the primary that had been cut off). There is always one try. A pause never reaches beyond the
    budget, and no try starts after its end.
    """
    before: BaseException | None = None

    def wait(state: tenacity.RetryCallState) -> float:
        return min(pause_s(state.attempt_number, rng), budget.remaining_s())

    def stop(state: tenacity.RetryCallState) -> bool:
        return budget.spent()

    def before_sleep(state: tenacity.RetryCallState) -> None:
        nonlocal before
        if state.outcome is not None:
            error = state.outcome.exception()
            if error is not None:
                before = error
                on_retry(state.attempt_number, error)

    def exhausted(state: tenacity.RetryCallState) -> T:
        last = state.outcome.exception() if state.outcome is not None else None
        assert last is not None  # the loop goes on, or stops, after failures only
        if before is None:
            raise last
        raise before from last

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary),
        wait=wait,
        stop=stop,
        before_sleep=before_sleep,
        sleep=sleep,
        retry_error_callback=exhausted,
    )
    return retrying(lambda: call(budget.per_try_s(try_s)))
