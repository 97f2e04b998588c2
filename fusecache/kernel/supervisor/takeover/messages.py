"""What two supervisors say to each other when a mount goes from one to the other.

    new   hello     protocols, version, source                        whether they understand each other
    old   yielding  protocols, version, open_mode                     or `refused` with a text
    old   given     the connection's facts; its descriptors           once agent and embedded server have ended
    new   ready                                                       everything runs, the gate does not read yet
    old   drained   what the gate held and had not answered, a memfd
    new   serving                                                     the old side ends without unmounting
    old   withdrawn a text, at any time: the old side goes on

How it gets there: `line`. Both sides send the lowest and the highest protocol
that they speak, and the highest common one counts. Fields that are not known are ignored, so that a protocol can grow;
what is known is checked (`facts`): the other side is another build of ours, running as the same user, and may still be
wrong.
"""

from __future__ import annotations

from typing import Final

from fusecache.kernel.channel import Message

PROTOCOLS: Final = (1, 1)
"""The lowest and the highest protocol that this build speaks."""

MOST_TEXT: Final = 4096


def common_protocol(message: Message, ours: tuple[int, int] = PROTOCOLS) -> int | None:
    """The protocol that both sides speak, the highest one; None: there is none, or the message does not say."""
    theirs = message.get("protocols")
    if not isinstance(theirs, list) or len(theirs) != 2 or not all(type(number) is int for number in theirs):
        return None
    highest = min(theirs[1], ours[1])
    return highest if highest >= max(theirs[0], ours[0]) else None


def refusal(hello: Message, source: str) -> str | None:
    """Why the mount of `source` is not given to who says hello; None: it is."""
    if common_protocol(hello) is None:
        return (
            f"it speaks the take-over protocols {PROTOCOLS[0]} to {PROTOCOLS[1]}, and was asked in "
            f"{str(hello.get('protocols'))[:40]}"
        )
    theirs = str(hello.get("source", ""))
    if theirs != source:
        return f"it serves {source!r}, and another source ({theirs[:MOST_TEXT]!r}) is no upgrade"
    return None


def text_of(message: Message) -> str:
    """A text of the other side, on one line."""
    return " ".join(str(message.get("text", "")).split())[:MOST_TEXT]
