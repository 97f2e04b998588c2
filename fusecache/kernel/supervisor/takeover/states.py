"""Who has a mount while it goes from one supervisor to another: both sides' states, as two tables. Pure.

    old   serving -> yielding -> yielded -> draining -> drained -> handed over
    new   preparing -> ready -> serving

The old side stops what can't be there twice (agent, embedded server) while its gate and workers go on reading; the new
side starts everything else it needs; then the old gate is emptied, and the new one goes on with what it held. Each
state of the old side but the first and the last has a time limit (`OldCourse.limit_s`), so nothing waits for ever: who
is late or lost has lost the mount to the other one.

Who has it is decided by a token that both sides hold and one can take, an eventfd whose one count is read once: the new
side takes it before its gate reads, the old side before it goes back to serving. So two gates never read at a time,
whatever is lost or late on the way, and a side that was stopped for an hour finds out when it goes on.

Events and actions are words; who carries the actions out is `old_side` and `new_side`. An event that a state
does not know changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

OldState = Literal["serving", "yielding", "yielded", "draining", "returning", "drained", "handed over"]
OldEvent = Literal[
    "hello",
    "parts ended",
    "ready",
    "gate emptied",
    "gate ended",
    "serving",
    "lost",
    "late",
    "died serving",
]
"""`lost` and `late` mean that the token was there to be taken back. When it was not, a new side that is late to say so
is `serving`, and one that is lost `died serving`: it may have read requests that nobody will answer."""

OldAction = Literal[
    "stop parts",
    "give",
    "empty gate",
    "pass on",
    "leave",
    "withdraw",
    "start parts",
    "refill gate",
    "replace gate",
    "kill gate",
]

NewState = Literal["preparing", "ready", "alone", "serving", "failed"]
NewEvent = Literal["all ready", "drained", "withdrawn", "late", "orphaned"]
"""`orphaned`: the old side is gone and the token was taken. `withdrawn`: the old side has it."""

NewAction = Literal["say ready", "take", "save", "serve", "fail"]

YIELDING_S: Final = 15.0
"""For agent and embedded server to end: they are killed after a part of it."""

DRAINING_S: Final = 5.0
"""For the gate to give up what it holds; it waits a quarter of a second for answers."""

DRAINED_S: Final = 4.0
"""From what the gate held to the new side's word that it serves, which takes milliseconds."""

READY_S: Final = 30.0
"""From the new side's `ready` to the old side's `drained`, before the new side gives up."""

OLD: Final[Mapping[tuple[OldState, OldEvent], tuple[OldState, tuple[OldAction, ...]]]] = {
    ("serving", "hello"): ("yielding", ("stop parts",)),
    ("yielding", "parts ended"): ("yielded", ("give",)),
    ("yielding", "lost"): ("serving", ("start parts",)),
    ("yielding", "late"): ("serving", ("withdraw", "start parts")),
    ("yielding", "gate ended"): ("yielding", ("replace gate",)),
    ("yielded", "ready"): ("draining", ("empty gate",)),
    ("yielded", "lost"): ("serving", ("start parts",)),
    ("yielded", "late"): ("serving", ("withdraw", "start parts")),
    ("yielded", "died serving"): ("serving", ("replace gate", "start parts")),
    # The new side holds the dead gate's device: only when it has let go are the gate's requests answered.
    ("yielded", "gate ended"): ("serving", ("withdraw", "replace gate", "start parts")),
    ("draining", "gate emptied"): ("drained", ("pass on",)),
    ("draining", "gate ended"): ("serving", ("withdraw", "replace gate", "start parts")),
    ("draining", "lost"): ("returning", ()),
    ("draining", "late"): ("returning", ("withdraw", "kill gate")),
    ("draining", "died serving"): ("returning", ("kill gate",)),
    ("returning", "gate emptied"): ("serving", ("refill gate", "start parts")),
    ("returning", "gate ended"): ("serving", ("replace gate", "start parts")),
    ("returning", "late"): ("returning", ("kill gate",)),
    ("drained", "serving"): ("handed over", ("leave",)),
    ("drained", "lost"): ("serving", ("refill gate", "start parts")),
    ("drained", "late"): ("serving", ("withdraw", "refill gate", "start parts")),
    ("drained", "died serving"): ("serving", ("replace gate", "start parts")),
}

NEW: Final[Mapping[tuple[NewState, NewEvent], tuple[NewState, tuple[NewAction, ...]]]] = {
    ("preparing", "all ready"): ("ready", ("say ready",)),
    ("preparing", "withdrawn"): ("failed", ("fail",)),
    ("preparing", "orphaned"): ("alone", ("save",)),
    ("ready", "drained"): ("serving", ("take",)),
    ("ready", "withdrawn"): ("failed", ("fail",)),
    ("ready", "late"): ("failed", ("fail",)),
    ("ready", "orphaned"): ("alone", ("save",)),
    ("alone", "all ready"): ("serving", ("serve",)),
}


class OldCourse:
    """Of one mount, over any number of take-overs."""

    def __init__(self, prepare_s: float) -> None:
        """`prepare_s`: seconds that a new side has from the descriptors to its `ready`."""
        self.state: OldState = "serving"
        self._limits_s: Mapping[OldState, float] = {
            "yielding": YIELDING_S,
            "yielded": prepare_s,
            "draining": DRAINING_S,
            "returning": DRAINING_S,
            "drained": DRAINED_S,
        }

    @property
    def is_active(self) -> bool:
        """A take-over is under way."""
        return self.state not in ("serving", "handed over")

    @property
    def is_given(self) -> bool:
        """The new side has all that it needs, and the token is there."""
        return self.state in ("yielded", "draining", "drained")

    @property
    def limit_s(self) -> float | None:
        """Seconds after which this state is `late`; None: it lasts."""
        return self._limits_s.get(self.state)

    def step(self, event: OldEvent) -> tuple[OldAction, ...]:
        """What follows from an event, in order."""
        self.state, actions = OLD.get((self.state, event), (self.state, ()))
        return actions


class NewCourse:
    """One take-over as its new side goes through it."""

    def __init__(self) -> None:
        self.state: NewState = "preparing"

    def step(self, event: NewEvent) -> tuple[NewAction, ...]:
        """What follows from an event, in order."""
        self.state, actions = NEW.get((self.state, event), (self.state, ()))
        return actions
