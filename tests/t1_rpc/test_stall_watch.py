"""The watch over live streams: fires for who waits too long, and for nobody else."""

from __future__ import annotations

import threading

from fusecache.clock import SystemClock
from fusecache.rpc.stall_watch import NEVER, StallWatch


def test_watch_late_call_is_cancelled_and_says_why() -> None:
    watch = StallWatch(SystemClock(), tick_s=0.01)
    cancelled = threading.Event()
    watched = watch.add(cancelled.set)
    watched.deadline = SystemClock().now() + 0.05
    assert cancelled.wait(5)
    assert watched.fired
    watch.close()


def test_watch_who_waits_for_nothing_is_left_alone() -> None:
    clock = SystemClock()
    watch = StallWatch(clock, tick_s=0.01)
    idle_cancelled, late_cancelled = threading.Event(), threading.Event()
    idle = watch.add(idle_cancelled.set)
    done = watch.add(idle_cancelled.set)
    done.deadline = clock.now() + 0.03
    watch.remove(done)
    late = watch.add(late_cancelled.set)
    late.deadline = clock.now() + 0.06
    assert late_cancelled.wait(5)
    assert idle.deadline == NEVER
    assert not idle_cancelled.is_set()
    watch.close()
    assert idle.fired


def test_watch_fires_again_after_it_had_nothing_to_do() -> None:
    clock = SystemClock()
    watch = StallWatch(clock, tick_s=0.01)
    for _ in range(3):
        cancelled = threading.Event()
        watched = watch.add(cancelled.set)
        watched.deadline = clock.now()
        assert cancelled.wait(5)
        watch.remove(watched)
        threading.Event().wait(0.03)
    watch.close()


def test_watch_without_streams_has_no_thread() -> None:
    before = threading.active_count()
    watch = StallWatch(SystemClock())
    assert threading.active_count() == before
    watch.close()


def test_watch_added_after_close_is_cancelled_at_once() -> None:
    watch = StallWatch(SystemClock())
    watch.close()
    cancelled = threading.Event()
    assert watch.add(cancelled.set).fired
    assert cancelled.is_set()
