"""What the kernel offers, what of it may be used, and which open mode follows. Pure: `probe` looks at the kernel.

    probe -> observations + mask -> Features -> decide_open_mode -> supervisor, gate, doctor, status

A feature is used when it is present and not masked. The mask is the setting kernel_features: `-NAME` leaves one feature
out, `as-5.14` and `as-6.6` everything that Linux of that version lacks, also in what INIT shows (`init_message`), so
that each kernel's way can be tested on a newer one. Nothing else in the program asks for a kernel version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from fusecache.errors import MountError, UsageError

OpenMode = Literal["auto", "no-open", "passthrough", "classic"]
OPEN_MODES: Final[tuple[str, ...]] = ("no-open", "passthrough", "auto")
"""Modes in which a supervisor and a gate run; `classic` has neither."""

KernelVersion = tuple[int, int]


class KnownFeature(NamedTuple):
    """One line of the table."""

    name: str
    since: KernelVersion
    """First Linux version with it."""

    flag: int
    """Its bit in INIT's 64 bits of flags (include/uapi/linux/fuse.h); 0 where INIT does not tell."""

    purpose: str


KNOWN_FEATURES: Final[tuple[KnownFeature, ...]] = (
    KnownFeature("mount", (2, 6), 0, "mount(2) without fusermount3: what stands between the kernel and the workers"),
    KnownFeature("store", (2, 6), 0, "FUSE_NOTIFY_STORE: bytes pushed into the page cache"),
    KnownFeature("no-open", (3, 15), 1 << 17, "FUSE_NO_OPEN_SUPPORT: no OPEN and no RELEASE per file"),
    KnownFeature("clone", (4, 2), 0, "FUSE_DEV_IOC_CLONE: a device of its own for each gate"),
    KnownFeature("max-pages", (4, 20), 1 << 22, "FUSE_MAX_PAGES: requests of 1 MiB instead of 128 KiB"),
    KnownFeature("no-opendir", (5, 1), 1 << 24, "FUSE_NO_OPENDIR_SUPPORT: no OPENDIR and no RELEASEDIR"),
    KnownFeature("init-ext", (5, 17), 1 << 30, "FUSE_INIT_EXT: the second word of INIT's flags"),
    KnownFeature("passthrough", (6, 9), 1 << 37, "FUSE_PASSTHROUGH: the kernel reads the backing file itself"),
    KnownFeature("resend", (6, 9), 1 << 39, "FUSE_NOTIFY_RESEND: requests in flight outlive the gate"),
)
FEATURE_NAMES: Final = tuple(feature.name for feature in KNOWN_FEATURES)
PRESETS: Final[Mapping[str, KernelVersion]] = {"as-5.14": (5, 14), "as-6.6": (6, 6)}


class Feature(NamedTuple):
    """One feature on this machine."""

    name: str
    present: bool
    masked: bool
    why: str
    """In words: how it was found, or what is missing, or what masks it."""

    @property
    def usable(self) -> bool:
        """Present and not masked."""
        return self.present and not self.masked


class Observation(NamedTuple):
    """What the probe saw of one feature."""

    present: bool
    why: str


class Decision(NamedTuple):
    """A choice and its reason, for the log, `doctor` and `status`."""

    open_mode: OpenMode
    why: str


class Features:
    """All known features, in the table's order."""

    def __init__(self, rows: Iterable[Feature]) -> None:
        self.rows = tuple(rows)
        self._by_name = {row.name: row for row in self.rows}
        if tuple(row.name for row in self.rows) != FEATURE_NAMES:
            raise UsageError(f"features are {', '.join(self._by_name)}, not {', '.join(FEATURE_NAMES)}")

    def __getitem__(self, name: str) -> Feature:
        return self._by_name[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]

    def usable(self, name: str) -> bool:
        """Whether feature `name` may be used."""
        return self._by_name[name].usable

    def describe(self) -> list[dict[str, Any]]:
        """Rows name/present/masked/why, for `doctor` and `status`."""
        return [row._asdict() for row in self.rows]

    def to_rows(self) -> list[list[Any]]:
        """For JSON."""
        return [list(row) for row in self.rows]

    @classmethod
    def from_rows(cls, rows: Any) -> Features:
        """Read what `to_rows` wrote. UsageError when it is something else."""
        if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise UsageError("features are not a list of [name, present, masked, why]")
        return cls(Feature(*row) for row in rows)


def judge(observed: Mapping[str, Observation], masked: Iterable[str]) -> Features:
    """Put the mask (words as of `parse_mask`) over what the probe saw. What it did not see counts as missing."""
    words = tuple(masked)
    rows = []
    for known in KNOWN_FEATURES:
        seen = observed.get(known.name, Observation(False, "not probed"))
        by = mask_of(known, words)
        why = f"masked by kernel_features ({by}); otherwise: {seen.why}" if by else seen.why
        rows.append(Feature(known.name, seen.present, by is not None, why))
    return Features(rows)


def parse_mask(text: str) -> tuple[str, ...]:
    """Words of the setting kernel_features, such as `-resend,-passthrough` or `as-5.14`; empty masks nothing.

    Raises UsageError that names the word and what is allowed. The result's words stand without the dash.
    """
    words = []
    for given in filter(None, (part.strip() for part in text.split(","))):
        if given in PRESETS:
            words.append(given)
        elif given.startswith("-") and given[1:] in FEATURE_NAMES:
            words.append(given[1:])
        else:
            allowed = ", ".join([*(f"-{name}" for name in FEATURE_NAMES), *PRESETS])
            raise UsageError(f"kernel_features {given!r} is not one of {allowed}")
    return tuple(dict.fromkeys(words))


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError for a word that `parse_mask` would not give."""
    for word in words:
        if word not in FEATURE_NAMES and word not in PRESETS:
            raise UsageError(f"masked feature {word!r} is not one of {', '.join([*FEATURE_NAMES, *PRESETS])}")


def mask_of(known: KnownFeature, words: Iterable[str]) -> str | None:
    """The word that masks a feature, None when none does."""
    for word in words:
        if word == known.name or (word in PRESETS and known.since > PRESETS[word]):
            return word
    return None


def mode_is_possible(features: Features, open_mode: str) -> str | None:
    """None when the mode can run here, otherwise what is missing, in words."""
    needed = {
        "classic": (),
        "no-open": ("mount", "clone", "no-open"),
        "passthrough": ("mount", "clone", "init-ext", "passthrough"),
    }[open_mode]
    missing = [features[name] for name in needed if not features.usable(name)]
    return f"{missing[0].name}: {missing[0].why}" if missing else None


def decide_open_mode(features: Features, wanted: OpenMode) -> Decision:
    """The mode that is started: `auto` only where the agent then chooses by the data between both others.

    A mode that was named and is impossible is a MountError, not another mode: who names one has a reason.
    """
    if wanted != "auto":
        if reason := mode_is_possible(features, wanted):
            raise MountError(f"open_mode {wanted} can't be used here: {reason}; leave it at auto, or take classic")
        return Decision(wanted, f"open_mode is {wanted}")
    without_no_open = mode_is_possible(features, "no-open")
    without_passthrough = mode_is_possible(features, "passthrough")
    if without_no_open is None and without_passthrough is None:
        return Decision("auto", "this kernel can do both; the mean size of the files decides")
    if without_no_open is None:
        return Decision("no-open", f"passthrough is impossible ({without_passthrough})")
    if without_passthrough is None:
        return Decision("passthrough", f"no-open is impossible ({without_no_open})")
    return Decision("classic", without_no_open)


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [str, bool, bool, str]
