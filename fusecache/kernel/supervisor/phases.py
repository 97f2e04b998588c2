"""The phases of a mount, and what a part's end or a request to end means in each. Pure; `supervisor` carries it out.

    preparing   the agent connects to the cluster and says the open mode
    starting    mounted (or given by another process); no request is answered here yet
    serving     until somebody asks for the end, the mount is unmounted, or another process has it
    stopping    unmounted or about to be; what is in flight is answered

Before `serving` the end of a part ends the start, with an error that says which one. Afterwards nothing but a gate that
can't be kept alive ends the mount.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["preparing", "starting", "serving", "stopping"]

AfterGate = Literal["end", "unmounted", "too early", "handing over", "give up", "replace"]
AfterOther = Literal["too early", "again", "nothing"]
AtRequest = Literal["once handed over", "at once", "hurry", "not served", "unmount"]


def after_gate(phase: Phase, *, is_connected: bool, is_handing_over: bool, is_looping: bool) -> AfterGate:
    """What the gate's end means. Without a connection it did what it had to; its end is the mount's."""
    if phase == "stopping":
        return "end"
    if not is_connected:
        return "unmounted"
    if phase != "serving":
        return "too early"
    if is_handing_over:
        return "handing over"
    return "give up" if is_looping else "replace"


def after_other(phase: Phase, *, is_hopeless: bool = False) -> AfterOther:
    """What the end of the agent or the embedded server means. `is_hopeless`: it never did its work, and never will."""
    if phase in ("preparing", "starting") or is_hopeless:
        return "too early"
    return "again" if phase == "serving" else "nothing"


def at_request(phase: Phase, *, is_handing_over: bool, was_asked: bool) -> AtRequest:
    """How the mount ends when a signal or the agent asks for it. In the middle of a take-over it has to be clear first
    who has the mount; who then asks again (`was_asked`) does not want to wait."""
    if is_handing_over:
        return "at once" if was_asked else "once handed over"
    if phase == "stopping":
        return "hurry"
    return "unmount" if phase == "serving" else "not served"
