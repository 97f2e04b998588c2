"""One retry loop for unary calls: a total budget, a deadline per try, jittered pauses that grow.

The caller gives the call (it gets the seconds of its try), and the answer to "may a second try help?"
(`alluxio.status.is_temporary`): this module knows no protocol. When the budget ends, the last error is
raised as it came.
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
    """`call(seconds)` until it answers, fails for good, or the budget ends; then the last error is raised.

    There is always one try. A pause never reaches beyond the budget, and no try starts after its end.
    """

    def wait(state: tenacity.RetryCallState) -> float:
        return min(pause_s(state.attempt_number, rng), budget.remaining_s())

    def stop(state: tenacity.RetryCallState) -> bool:
        return budget.spent()

    def before_sleep(state: tenacity.RetryCallState) -> None:
        if state.outcome is not None:
            error = state.outcome.exception()
            if error is not None:
                on_retry(state.attempt_number, error)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_temporary),
        wait=wait,
        stop=stop,
        before_sleep=before_sleep,
        sleep=sleep,
        reraise=True,
    )
    return retrying(lambda: call(budget.per_try_s(try_s)))
