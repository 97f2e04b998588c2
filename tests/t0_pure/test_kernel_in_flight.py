"""Who gets a request, and that none is lost or answered twice, whichever workers die in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel import wire
from fusecache.kernel.gate.in_flight import (
    MOST_DELIVERIES,
    MOST_OTHERS,
    MOST_REMEMBERED,
    STALL_S,
    InFlight,
    Load,
    Request,
)


class Sockets:
    """Workers that have not taken out what was sent."""

    def __init__(self) -> None:
        self.unread: set[int] = set()
        self.asked = 0

    def __call__(self, load: Load) -> bool:
        self.asked += 1
        return load.index in self.unread


def workers(count: int, slots: int = 2) -> tuple[InFlight, list[Load], Sockets]:
    sockets = Sockets()
    in_flight = InFlight(sockets)
    loads = [Load(index, slots) for index in range(count)]
    for load in loads:
        load.ready = True
        in_flight.loads[load.index] = load
    return in_flight, loads, sockets


def read(unique: int, inode: int = 1) -> Request:
    return Request(wire.READ, unique, inode, b"")


def look_up(unique: int) -> Request:
    return Request(wire.LOOKUP, unique, 1, b"")


def test_reads_of_an_inode_stay_with_one_worker_while_it_has_slots() -> None:
    in_flight, loads, _ = workers(2)
    first = in_flight.choose(read(1), 0)
    assert first is loads[0]
    in_flight.given(read(1), first, 0)
    assert in_flight.choose(look_up(2), 0) is loads[1]
    assert in_flight.choose(read(3), 0) is loads[0]
    in_flight.given(read(3), loads[0], 0)
    assert in_flight.choose(read(4), 0) is loads[1]


def test_slow_look_ups_do_not_take_the_credits_of_reads() -> None:
    in_flight, loads, _ = workers(1)
    for unique in range(MOST_OTHERS):
        in_flight.given(look_up(unique), loads[0], 0)
    assert in_flight.choose(look_up(100), 0) is None
    assert in_flight.choose(read(101), 0) is loads[0]
    in_flight.given(read(101), loads[0], 0)
    in_flight.given(read(102), loads[0], 0)
    assert in_flight.choose(read(103), 0) is None
    assert in_flight.answer_of(loads[0], 5, 0) is not None
    assert in_flight.choose(look_up(104), 0) is loads[0]


def test_a_worker_that_leaves_its_socket_unread_gets_nothing() -> None:
    in_flight, loads, sockets = workers(2)
    in_flight.given(read(1), loads[0], 10.0)
    sockets.unread.add(0)
    assert in_flight.choose(read(2), 10.0 + STALL_S / 2) is loads[0]
    assert sockets.asked == 0
    assert in_flight.choose(read(2), 10.0 + 2 * STALL_S) is loads[1]
    assert sockets.asked > 0
    sockets.unread.clear()
    assert in_flight.choose(read(2), 10.0 + 2 * STALL_S) is loads[0]


def test_a_worker_that_owes_nothing_is_awake_however_long_ago_it_answered() -> None:
    in_flight, loads, sockets = workers(1)
    sockets.unread.add(0)
    assert in_flight.choose(read(1), 1e6) is loads[0]


def test_the_requests_of_a_dead_worker_go_to_another_one_in_their_order() -> None:
    in_flight, loads, _ = workers(2, slots=9)
    requests = [read(unique) for unique in range(1, 5)]
    for request in requests:
        in_flight.given(request, loads[0], 0)
    assert in_flight.answer_of(loads[0], 2, 0) is requests[1]
    again, poisoned = in_flight.died(loads[0])
    assert [request.unique for request in again] == [1, 3, 4]
    assert not poisoned
    in_flight.wait_first(again)
    assert [request.unique for request in in_flight.waiting_reads] == [1, 3, 4]
    assert in_flight.choose(again[0], 0) is loads[1]


def test_a_request_that_kills_every_worker_is_given_up_and_blames_no_other() -> None:
    in_flight, loads, _ = workers(1, slots=9)
    poison, innocent = look_up(1), look_up(2)
    for delivery in range(1, MOST_DELIVERIES):
        for request in (poison, innocent):
            assert in_flight.choose(request, 0) is loads[0], delivery
            in_flight.given(request, loads[0], 0)
        again, given_up = in_flight.died(loads[0])
        assert again == [poison, innocent]
        assert not given_up
        loads = [Load(0, 9)]
        loads[0].ready = True
        in_flight.loads[0] = loads[0]
    in_flight.given(poison, loads[0], 0)
    assert in_flight.choose(look_up(3), 0) is None
    assert in_flight.choose(innocent, 0) is None
    assert in_flight.died(loads[0]) == ([], [poison])
    assert in_flight.poisoned == 1


def test_the_last_delivery_waits_for_a_worker_that_holds_nothing() -> None:
    in_flight, loads, _ = workers(1)
    suspicious = look_up(1)
    suspicious.deliveries = MOST_DELIVERIES - 1
    in_flight.given(read(2), loads[0], 0)
    assert in_flight.choose(suspicious, 0) is None
    in_flight.answer_of(loads[0], 2, 0)
    assert in_flight.choose(suspicious, 0) is loads[0]
    in_flight.given(suspicious, loads[0], 0)
    assert in_flight.answer_of(loads[0], 1, 0) is suspicious
    assert in_flight.choose(read(3), 0) is loads[0]


def test_the_last_delivery_does_not_wait_for_ever_while_others_ask_for_more() -> None:
    """One worker takes nothing new until it has come to an end; the other one goes on with everything."""
    in_flight, loads, _ = workers(2)
    uniques = iter(range(10, 1000))

    def look_up_somewhere() -> None:
        request = look_up(next(uniques))
        load = in_flight.choose(request, 0)
        assert load is not None, "the other worker takes them"
        in_flight.given(request, load, 0)

    suspicious = read(1)
    suspicious.deliveries = MOST_DELIVERIES - 1
    in_flight.wait_first([suspicious])
    assert in_flight.choose(read(2), 0) is loads[0], "other reads do not wait behind it"
    for _ in range(8):
        look_up_somewhere()
    for _ in range(100):
        if (load := in_flight.choose(in_flight.waiting_last[0], 0)) is not None:
            break
        for busy in loads:
            in_flight.answer_of(busy, next(iter(busy.owed)), 0)
            look_up_somewhere()
    assert load is not None
    assert not load.owed
    in_flight.given(in_flight.waiting_last.popleft(), load, 0)
    assert in_flight.answer_of(load, 1, 0) is suspicious
    assert in_flight.choose(look_up(2000), 0) is load, "and is as before"


def test_a_worker_kept_free_for_one_that_was_given_up_is_free_for_all() -> None:
    in_flight, loads, _ = workers(1)
    in_flight.given(look_up(5), loads[0], 0)
    suspicious = read(1)
    suspicious.deliveries = MOST_DELIVERIES - 1
    in_flight.wait_first([suspicious])
    assert in_flight.choose(suspicious, 0) is None
    assert in_flight.choose(look_up(6), 0) is None
    in_flight.give_up(suspicious)
    assert in_flight.choose(look_up(6), 0) is loads[0]
    assert not in_flight.waiting


def test_of_two_last_deliveries_one_is_waited_for_while_the_other_worker_serves_all() -> None:
    in_flight, loads, _ = workers(2)
    first, second = read(1), read(2)
    first.deliveries = second.deliveries = MOST_DELIVERIES - 1
    in_flight.given(look_up(5), loads[1], 0)
    assert in_flight.choose(first, 0) is loads[0]
    in_flight.given(first, loads[0], 0)
    assert in_flight.choose(second, 0) is None
    assert in_flight.choose(look_up(6), 0) is loads[1], "it is not kept free as well"
    in_flight.answer_of(loads[0], 1, 0)
    assert in_flight.choose(second, 0) is loads[0]


def test_an_answer_shows_that_a_worker_is_awake() -> None:
    in_flight, loads, sockets = workers(1, slots=9)
    in_flight.given(read(1), loads[0], 0)
    in_flight.given(read(2), loads[0], 0)
    in_flight.answer_of(loads[0], 1, 10.0)
    sockets.unread.add(0)
    assert in_flight.choose(read(3), 10.0 + STALL_S / 2) is loads[0]
    assert in_flight.overdue(10.1, 0.25) == []
    assert in_flight.quiet(10.5, 1.0) == []


def test_what_was_no_answer_is_owed_again_with_its_credit() -> None:
    in_flight, loads, _ = workers(1, slots=1)
    request = read(1)
    in_flight.given(request, loads[0], 0)
    assert in_flight.answer_of(loads[0], 1, 0) is request
    in_flight.take_back(loads[0], request)
    assert in_flight.choose(read(2), 0) is None
    assert in_flight.died(loads[0]) == ([request], [])
    assert in_flight.redelivered == 1
    assert not in_flight.loads


def test_a_worker_that_hangs_is_not_the_one_that_is_kept_free() -> None:
    in_flight, loads, sockets = workers(2)
    in_flight.given(look_up(5), loads[0], 0)
    in_flight.given(look_up(6), loads[1], 0)
    in_flight.given(look_up(7), loads[1], 0)
    sockets.unread.add(0)
    suspicious = read(1)
    suspicious.deliveries = MOST_DELIVERIES - 1
    assert in_flight.choose(suspicious, 1.0) is None
    in_flight.answer_of(loads[1], 6, 1.0)
    in_flight.answer_of(loads[1], 7, 1.0)
    assert in_flight.choose(suspicious, 1.0) is loads[1]
    sockets.unread.clear()
    assert in_flight.choose(look_up(8), 1.0) is loads[0], "as before"


def test_a_request_left_unread_is_given_to_another_worker_and_answered_once() -> None:
    in_flight, loads, sockets = workers(2)
    request = read(1)
    in_flight.given(request, loads[0], 0)
    sockets.unread.add(0)
    assert in_flight.overdue(0.1, 0.25) == []
    assert in_flight.overdue(0.3, 0.25) == [request]
    other = in_flight.choose(request, 0.3)
    assert other is loads[1]
    in_flight.given(request, other, 0.3)
    assert in_flight.overdue(0.6, 0.25) == []
    assert in_flight.answer_of(loads[1], 1, 0.3) is request
    assert in_flight.answer_of(loads[0], 1, 4.0) is None
    assert in_flight.owed == 0


def test_a_request_that_two_workers_hold_is_not_given_away_when_one_dies() -> None:
    in_flight, loads, _ = workers(2)
    request = read(1)
    in_flight.given(request, loads[0], 0)
    in_flight.given(request, loads[1], 0)
    assert in_flight.died(loads[0]) == ([], [])
    assert in_flight.died(loads[1]) == ([request], [])


def test_an_answer_to_nothing_is_nobodys() -> None:
    in_flight, loads, _ = workers(2)
    in_flight.given(read(1), loads[0], 0)
    assert in_flight.answer_of(loads[0], 2, 0) is None
    assert in_flight.answer_of(loads[1], 1, 0) is None


def test_a_worker_that_only_talks_is_not_awake() -> None:
    """What it was given lies in its socket, and goes to another one; the supervisor hears for how long."""
    in_flight, loads, sockets = workers(2)
    request = read(1)
    in_flight.given(request, loads[0], 0)
    sockets.unread.add(0)
    for moment in range(1, 100):
        assert in_flight.answer_of(loads[0], 5000 + moment, moment / 100) is None
    assert in_flight.overdue(1.0, 0.25) == [request]
    assert in_flight.unread_s(loads[0], 1.0) == 1.0
    assert in_flight.quiet(1.0, 1.0) == [loads[0]]


def test_a_quiet_worker_is_named_once_in_a_while() -> None:
    in_flight, loads, _ = workers(2)
    in_flight.given(read(1), loads[0], 0)
    assert in_flight.quiet(0.9, 1.0) == []
    assert in_flight.quiet(1.0, 1.0) == [loads[0]]
    assert in_flight.quiet(1.5, 1.0) == []
    assert in_flight.quiet(2.0, 1.0) == [loads[0]]


def test_the_memory_of_who_read_what_is_bounded() -> None:
    in_flight, loads, _ = workers(1, slots=1 << 30)
    for unique in range(MOST_REMEMBERED + 10):
        in_flight.given(read(unique, inode=unique), loads[0], 0)
        in_flight.answer_of(loads[0], unique, 0)
    assert len(in_flight._last_reader) <= MOST_REMEMBERED


@given(st.lists(st.tuples(st.sampled_from(["new", "answer", "die", "stall", "read"]), st.integers(0, 9)), max_size=80))
def test_every_request_is_answered_once_whatever_happens(steps: list[tuple[str, int]]) -> None:
    in_flight, loads, sockets = workers(3, slots=2)
    answered: list[int] = []
    now_s = 0.0
    made = 0

    def dispatch() -> None:
        for queue in in_flight.queues:
            while queue and (load := in_flight.choose(queue[0], now_s)):
                in_flight.given(queue.popleft(), load, now_s)
                assert load.reads <= 2
                assert load.reads == sum(request.opcode == wire.READ for request in load.owed.values())

    def die(index: int) -> None:
        again, poisoned = in_flight.died(loads[index])
        answered.extend(request.unique for request in poisoned)
        in_flight.wait_first(again)
        loads[index] = Load(index, 2)
        loads[index].ready = True
        in_flight.loads[index] = loads[index]
        sockets.unread.discard(index)

    for step, number in steps:
        now_s += 0.01
        load = loads[number % 3]
        if step == "new":
            made += 1
            request = read(made, number) if number % 2 else look_up(made)
            in_flight.queue_of(request).append(request)
        elif step == "answer" and load.owed:
            request_or_none = in_flight.answer_of(load, next(iter(load.owed)), now_s)
            answered.extend([request_or_none.unique] if request_or_none else [])
        elif step == "die":
            die(number % 3)
        elif step == "stall":
            sockets.unread.add(number % 3)
        elif step == "read":
            sockets.unread.discard(number % 3)
        for request in in_flight.overdue(now_s, 0.05):
            if (second := in_flight.choose(request, now_s)) is not None:
                in_flight.given(request, second, now_s)
        dispatch()
    sockets.unread.clear()
    for _ in range(made * 4):
        for load in loads:
            for unique in list(load.owed):
                request_or_none = in_flight.answer_of(load, unique, now_s)
                answered.extend([request_or_none.unique] if request_or_none else [])
        dispatch()
    assert sorted(answered) == list(range(1, made + 1))
    assert not in_flight.is_busy
