"""The table of kernel features: masks, what follows for the open mode, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.errors import MountError, UsageError
from fusecache.kernel import features
from fusecache.kernel.features import FEATURE_NAMES, Features, Observation, decide_open_mode, judge, parse_mask


def found(*missing: str, masked: Iterable[str] = ()) -> Features:
    """All features but the missing ones."""
    seen = {name: Observation(name not in missing, "gone" if name in missing else "seen") for name in FEATURE_NAMES}
    return judge(seen, masked)


def usable(result: Features) -> set[str]:
    return {row.name for row in result.rows if row.usable}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        (" , ", ()),
        ("-resend", ("resend",)),
        ("-resend,-passthrough", ("resend", "passthrough")),
        (" -resend , -resend", ("resend",)),
        ("as-5.14,-store", ("as-5.14", "store")),
    ],
)
def test_a_mask_is_a_list_of_words(text: str, words: tuple[str, ...]) -> None:
    assert parse_mask(text) == words


@pytest.mark.parametrize("text", ["resend", "-resnd", "--resend", "as-5.15", "-as-5.14", "-resend;-store"])
def test_a_word_that_is_none_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError) as failure:
        parse_mask(text)
    assert repr(text) in str(failure.value)
    assert "-passthrough" in str(failure.value)
    assert "as-6.6" in str(failure.value)


def test_presets_leave_what_that_kernel_has() -> None:
    everything = set(FEATURE_NAMES)
    assert usable(found()) == everything
    assert usable(found(masked=["as-6.6"])) == everything - {"passthrough", "resend"}
    assert usable(found(masked=["as-5.14"])) == everything - {"passthrough", "resend", "init-ext"}


def test_a_masked_feature_says_so_and_what_was_found() -> None:
    row = found(masked=["as-6.6"])["resend"]
    assert row == ("resend", True, True, "masked by kernel_features (as-6.6); otherwise: seen")


def test_what_was_not_probed_is_missing() -> None:
    assert judge({}, ())["clone"] == ("clone", False, False, "not probed")


@pytest.mark.parametrize(
    ("missing", "mode", "why"),
    [
        ((), "auto", "this kernel can do both; the mean size of the files decides"),
        (("resend", "store"), "auto", "this kernel can do both; the mean size of the files decides"),
        (("passthrough",), "no-open", "passthrough is impossible (passthrough: gone)"),
        (("no-open",), "passthrough", "no-open is impossible (no-open: gone)"),
        (("no-open", "passthrough"), "classic", "no-open: gone"),
        (("mount",), "classic", "mount: gone"),
        (("clone",), "classic", "clone: gone"),
    ],
)
def test_auto_takes_what_is_possible(missing: tuple[str, ...], mode: str, why: str) -> None:
    assert decide_open_mode(found(*missing), "auto") == (mode, why)


@pytest.mark.parametrize("mode", ["classic", "no-open", "passthrough"])
def test_a_named_mode_is_taken(mode: features.OpenMode) -> None:
    assert decide_open_mode(found(), mode) == (mode, f"open_mode is {mode}")


def test_a_named_mode_that_is_impossible_is_refused_not_replaced() -> None:
    with pytest.raises(MountError) as failure:
        decide_open_mode(found("mount", "passthrough"), "passthrough")
    assert str(failure.value) == (
        "open_mode passthrough can't be used here: mount: gone; leave it at auto, or take classic"
    )


def test_classic_needs_nothing() -> None:
    assert decide_open_mode(found(*FEATURE_NAMES), "classic").open_mode == "classic"


@given(st.sets(st.sampled_from(FEATURE_NAMES)), st.sets(st.sampled_from([*FEATURE_NAMES, *features.PRESETS])))
def test_auto_never_chooses_what_is_impossible(missing: set[str], masked: set[str]) -> None:
    result = found(*missing, masked=masked)
    mode = decide_open_mode(result, "auto").open_mode
    for one in ("no-open", "passthrough") if mode == "auto" else (mode,):
        assert features.mode_is_possible(result, one) is None


@given(st.sets(st.sampled_from(FEATURE_NAMES)), st.sets(st.sampled_from([*FEATURE_NAMES, *features.PRESETS])))
def test_rows_travel_as_json(missing: set[str], masked: set[str]) -> None:
    result = found(*missing, masked=masked)
    assert Features.from_rows(result.to_rows()) == result
    assert [row["name"] for row in result.describe()] == list(FEATURE_NAMES)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_rows_that_are_something_else_are_refused(rows: object) -> None:
    with pytest.raises(UsageError):
        Features.from_rows(rows)
