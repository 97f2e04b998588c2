"""What the end of a part, and a request to end, mean in each phase of a mount."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.supervisor.phases import Phase, after_gate, after_other, at_request

PHASES = get_args(Phase)
STARTS: tuple[Phase, ...] = ("preparing", "starting")
phases = st.sampled_from(PHASES)


def test_a_gate_that_dies_while_the_mount_serves_is_replaced() -> None:
    assert after_gate("serving", is_connected=True, is_handing_over=False, is_looping=False) == "replace"


def test_a_gate_that_can_not_be_kept_alive_ends_the_mount() -> None:
    assert after_gate("serving", is_connected=True, is_handing_over=False, is_looping=True) == "give up"


@given(st.booleans())
def test_while_the_mount_is_handed_over_the_take_over_says_what_follows(is_looping: bool) -> None:
    """Also for one that crash-loops: another process may have the mount by then."""
    assert after_gate("serving", is_connected=True, is_handing_over=True, is_looping=is_looping) == "handing over"


@given(st.sampled_from(STARTS), st.booleans())
def test_before_the_mount_serves_a_dead_gate_ends_the_start(phase: Phase, is_looping: bool) -> None:
    assert after_gate(phase, is_connected=True, is_handing_over=False, is_looping=is_looping) == "too early"


@given(phases, st.booleans(), st.booleans())
def test_without_a_connection_no_gate_is_ever_started(phase: Phase, is_handing_over: bool, is_looping: bool) -> None:
    """It was unmounted or aborted: the gate's end is the mount's, and no error."""
    follows = after_gate(phase, is_connected=False, is_handing_over=is_handing_over, is_looping=is_looping)
    assert follows == ("end" if phase == "stopping" else "unmounted")


@given(st.booleans(), st.booleans(), st.booleans())
def test_on_the_way_down_the_gates_end_is_the_end(connected: bool, is_handing_over: bool, is_looping: bool) -> None:
    assert (
        after_gate("stopping", is_connected=connected, is_handing_over=is_handing_over, is_looping=is_looping) == "end"
    )


@pytest.mark.parametrize(
    ("phase", "follows"),
    [("preparing", "too early"), ("starting", "too early"), ("serving", "again"), ("stopping", "nothing")],
)
def test_agent_and_embedded_server_are_started_again_for_as_long_as_the_mount_serves(
    phase: Phase, follows: str
) -> None:
    assert after_other(phase) == follows


def test_an_agent_that_never_was_ready_and_never_will_be_ends_the_start() -> None:
    assert after_other("serving", is_hopeless=True) == "too early"


@pytest.mark.parametrize(
    ("phase", "first"),
    [("preparing", "not served"), ("starting", "not served"), ("serving", "unmount"), ("stopping", "hurry")],
)
def test_a_request_to_end_outside_of_take_overs(phase: Phase, first: str) -> None:
    """Also where somebody asked before in a take-over that came to nothing: it begins anew."""
    for was_asked in (False, True):
        assert at_request(phase, is_handing_over=False, was_asked=was_asked) == first


@given(phases)
def test_a_request_in_the_middle_of_a_take_over_waits_and_the_second_one_does_not(phase: Phase) -> None:
    """Whatever the phase, the mount is not unmounted: it may be another process's by now."""
    assert at_request(phase, is_handing_over=True, was_asked=False) == "once handed over"
    assert at_request(phase, is_handing_over=True, was_asked=True) == "at once"
