"""INIT: what workers are shown, what the kernel is answered; any bytes have a defined result."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel import init_message
from fusecache.kernel.features import FEATURE_NAMES, PRESETS
from fusecache.kernel.init_message import (
    INIT_EXT,
    INIT_OUT,
    MAX_PAGES,
    PASSTHROUGH,
    WRITEBACK_CACHE,
    InitError,
    InitPlan,
    masked_request,
    parse_request,
    patched_answer,
    plan_for,
)

# Read from the device of Linux 6.18.
LINUX_6_18 = bytes.fromhex(
    "680000001a000000020000000000000000000000000000000000000000000000000000000000000007000000"
    "2d00000000000200fbffff73fd05000000000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000000000000"
)
UNIQUE = 2
MASKS = st.lists(st.sampled_from([*FEATURE_NAMES, *PRESETS]), max_size=4)


def plan(request: bytes = LINUX_6_18, *, passthrough: bool = False) -> InitPlan:
    return plan_for(
        request,
        passthrough=passthrough,
        max_read_bytes=1 << 20,
        read_ahead_bytes=1 << 20,
        max_background=64,
        congestion_threshold=48,
    )


def worker_answer(
    flags: int = 0x7FFFFF,
    *,
    unique: int = UNIQUE,
    error: int = 0,
    major: int = 7,
    minor: int = 38,
    body_bytes: int = 64,
) -> bytes:
    """As libfuse answers."""
    packed = INIT_OUT.pack(major, minor, 131072, flags & 0xFFFFFFFF, 12, 9, 1 << 20, 1, 32, 0, flags >> 32, 0, 0)
    body = packed.ljust(64, b"\0")[:body_bytes]
    return struct.pack("<IiQ", 16 + len(body), error, unique) + body


def fields(answer: bytes) -> dict[str, int]:
    names = ("major", "minor", "readahead", "flags", "background", "threshold", "max_write", "grain", "pages")
    names += ("alignment", "flags2", "depth", "timeout")
    return dict(zip(names, INIT_OUT.unpack_from(answer, 16), strict=True))


def test_the_kernels_request_is_read() -> None:
    request = parse_request(LINUX_6_18)
    assert request[:4] == (UNIQUE, 7, 45, 131072)
    assert request.flags == 0x5FD_73FFFFFB


def test_without_a_mask_the_request_is_shown_as_it_is() -> None:
    assert masked_request(LINUX_6_18, ()) == LINUX_6_18


def test_as_linux_5_14_the_request_is_7_34_and_ends_where_it_did() -> None:
    shown = masked_request(LINUX_6_18, ["as-5.14"])
    assert len(shown) == 56
    assert struct.unpack_from("<I", shown)[0] == 56
    request = parse_request(shown)
    assert (request.major, request.minor) == (7, 34)
    assert request.flags == 0x33FFFFFB, "bits 0 to 29 of what 6.18 offers"


def test_as_linux_6_6_the_request_is_7_39_without_passthrough_and_resend() -> None:
    request = parse_request(masked_request(LINUX_6_18, ["as-6.6"]))
    assert (request.major, request.minor) == (7, 39)
    assert request.flags == 0x1D_73FFFFFB


def test_single_features_are_left_out() -> None:
    whole = parse_request(LINUX_6_18).flags
    assert parse_request(masked_request(LINUX_6_18, ["passthrough"])).flags == whole & ~PASSTHROUGH
    assert parse_request(masked_request(LINUX_6_18, ["max-pages", "store"])).flags == whole & ~MAX_PAGES
    assert parse_request(masked_request(LINUX_6_18, ["init-ext"])).flags == whole & 0xFFFFFFFF & ~INIT_EXT


def test_the_answer_asks_for_what_libfuse_does_not_know() -> None:
    got = fields(patched_answer(worker_answer(), plan(passthrough=True)))
    assert got["flags"] & INIT_EXT
    assert got["flags2"] == PASSTHROUGH >> 32
    assert got["depth"] == 1
    assert (got["background"], got["threshold"]) == (64, 48)
    assert (got["pages"], got["readahead"]) == (256, 1 << 20)
    assert got["minor"] == 38


def test_the_answer_keeps_what_the_worker_said() -> None:
    got = fields(patched_answer(worker_answer(0x44001), plan()))
    assert got["flags"] & 0x44001 == 0x44001 & parse_request(LINUX_6_18).flags
    assert (got["max_write"], got["grain"]) == (1 << 20, 1)


def test_without_passthrough_the_answer_does_not_ask_for_it() -> None:
    got = fields(patched_answer(worker_answer(0x7FFFFF | INIT_EXT | PASSTHROUGH), plan()))
    assert (got["flags2"], got["depth"]) == (0, 0)


def test_a_write_back_cache_is_never_asked_for() -> None:
    assert not fields(patched_answer(worker_answer(), plan()))["flags"] & WRITEBACK_CACHE


def test_an_old_kernel_is_answered_in_its_own_words() -> None:
    got = fields(patched_answer(worker_answer(), plan(masked_request(LINUX_6_18, ["as-5.14"]))))
    assert not got["flags"] & INIT_EXT
    assert (got["flags2"], got["depth"], got["minor"]) == (0, 0, 34)


def test_where_the_kernel_lets_nobody_choose_the_pages_none_are_asked_for() -> None:
    got = fields(patched_answer(worker_answer(), plan(masked_request(LINUX_6_18, ["max-pages"]))))
    assert (got["pages"], got["flags"] & MAX_PAGES) == (0, 0)


def test_a_threshold_above_the_number_of_background_requests_is_that_number() -> None:
    made = plan_for(
        LINUX_6_18, passthrough=False, max_read_bytes=4096, read_ahead_bytes=0, max_background=5, congestion_threshold=9
    )
    assert (made.congestion_threshold, made.max_pages, made.max_readahead_bytes) == (5, 1, 0)


def test_a_short_answer_of_an_old_libfuse_is_filled_up() -> None:
    assert len(patched_answer(worker_answer(body_bytes=24), plan())) == 80


def test_passthrough_that_the_kernel_does_not_offer_is_an_error() -> None:
    wanted = plan(masked_request(LINUX_6_18, ["passthrough"]), passthrough=True)
    with pytest.raises(InitError, match="does not offer it"):
        patched_answer(worker_answer(), wanted)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "0 bytes"),
        (worker_answer()[:15], "15 bytes"),
        (worker_answer()[:-1], "says 80 bytes for request 2, 79 came"),
        (worker_answer(unique=3), "for request 3"),
        (worker_answer(error=-5), "error -5"),
        (worker_answer(major=8), "FUSE 8.38"),
        (worker_answer(body_bytes=20), "36 bytes"),
    ],
)
def test_an_unusable_answer_says_which_field(answer: bytes, text: str) -> None:
    with pytest.raises(InitError) as failure:
        patched_answer(answer, plan())
    assert text in str(failure.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m[:40], "40 bytes"),
        (lambda m: m[:4] + struct.pack("<I", 3) + m[8:], "opcode 3"),
        (lambda m: m + b"\0", "105 came"),
        (lambda m: m[:40] + struct.pack("<I", 8) + m[44:], "FUSE 8.45"),
        (lambda m: m[:44] + struct.pack("<I", 22) + m[48:], "FUSE 7.22"),
        (lambda m: struct.pack("<I", 56) + m[4:56], "FUSE_INIT_EXT"),
    ],
)
def test_an_unusable_request_says_which_field(change: object, text: str) -> None:
    with pytest.raises(InitError) as failure:
        parse_request(change(LINUX_6_18))  # type: ignore[operator]
    assert text in str(failure.value)


@given(st.binary(max_size=200))
def test_any_bytes_as_request(message: bytes) -> None:
    with pytest.raises(InitError):
        masked_request(message, ("as-5.14",))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_as_answer(message: bytes, header: bool) -> None:
    if header:
        message = struct.pack("<IiQ", 16 + len(message), 0, UNIQUE) + message
    made = plan()
    try:
        answer = patched_answer(message, made)
    except InitError:
        return
    assert len(answer) == 80
    got = fields(answer)
    assert got["major"] == 7
    assert (got["flags"] | got["flags2"] << 32) & ~made.kernel_flags == 0, "nothing that was not offered"
    assert got["minor"] <= 45


@given(MASKS)
def test_any_mask_gives_a_request_that_can_be_shown_and_answered(words: list[str]) -> None:
    shown = masked_request(LINUX_6_18, words)
    request = parse_request(shown)
    assert request.flags & ~parse_request(LINUX_6_18).flags == 0
    assert struct.unpack_from("<I", shown)[0] == len(shown)
    assert masked_request(shown, words) == shown
    passthrough = bool(request.flags & PASSTHROUGH)
    got = fields(patched_answer(worker_answer(), plan(shown, passthrough=passthrough)))
    assert got["depth"] == int(passthrough)


def test_plans_travel_as_json() -> None:
    made = plan(passthrough=True)
    assert InitPlan(**dataclasses.asdict(made)) == made


def test_every_flag_of_a_feature_is_in_the_table_of_versions() -> None:
    for known in init_message.KNOWN_FEATURES:
        if known.flag > init_message.OLD_BITS:
            assert init_message.FLAGS_SINCE[known.flag.bit_length() - 1] == known.since
