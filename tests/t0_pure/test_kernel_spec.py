"""The supervisor's specification: what is written is read, what can't be meant is refused with name and value."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.errors import UsageError
from fusecache.kernel.features import FEATURE_NAMES, Observation, judge
from fusecache.kernel.spec import MountSpec

FEATURES = judge({name: Observation(True, "seen") for name in FEATURE_NAMES}, ("resend",))


def spec(**fields: Any) -> MountSpec:
    needed: dict[str, Any] = {
        "mountpoint": "/mnt/data",
        "fsname": "alluxio://a:19998/",
        "allow_other": True,
        "open_mode": "auto",
        "features": FEATURES,
        "workers": 2,
        "gate_argv": ("python", "-m", "gate"),
        "worker_argv": ("python", "-m", "worker"),
        "agent_argv": ("python", "-m", "agent"),
        "plan_fd": 5,
        "agent_socket": "/run/agent",
        "control_socket": "/run/control",
    }
    return MountSpec(**{**needed, **fields})


@given(
    st.binary(max_size=20).map(lambda name: "/" + os.fsdecode(name)),
    st.none() | st.integers(0, 1000),
    st.dictionaries(st.text(max_size=5), st.integers() | st.lists(st.integers(), max_size=3), max_size=3),
    st.lists(st.sampled_from([*FEATURE_NAMES, "as-5.14"]), max_size=3),
)
def test_what_is_written_is_read(
    mountpoint: str, ready_fd: int | None, gate_settings: dict[str, Any], masked: list[str]
) -> None:
    made = spec(mountpoint=mountpoint, ready_fd=ready_fd, gate_settings=gate_settings, masked_features=tuple(masked))
    assert MountSpec.from_json(made.to_json()) == made


def test_it_travels_in_a_memfd_that_is_closed_once_it_was_read() -> None:
    made = spec(environment={"A": "ü"})
    descriptor = made.to_memfd()
    assert MountSpec.from_descriptor(descriptor) == made
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_descriptor_that_is_not_open_is_named() -> None:
    with pytest.raises(UsageError, match="--spec-fd 987654 can't be read: Bad file descriptor"):
        MountSpec.from_descriptor(987654)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mountpoint": "mnt"}, "mountpoint 'mnt' is not an absolute path"),
        ({"open_mode": "classic"}, "open_mode 'classic' is not one of no-open, passthrough, auto"),
        ({"masked_features": ("-resend",)}, "masked feature '-resend' is not one of mount, "),
        ({"workers": 0}, "workers 0 is not between 1 and 64"),
        ({"ready_fd": -1}, "ready_fd -1 is not between 0 and "),
        ({"embedded_pid": 0}, "embedded_pid 0 is not between 1 and "),
        ({"max_read_bytes": 5000}, "max_read_bytes 5000 is not a multiple of 4096"),
        ({"max_read_bytes": 2 << 20}, "max_read_bytes 2097152 is not between 4096 and 1048576"),
        ({"max_background": 65536}, "max_background 65536 is not between 1 and 65535"),
        ({"spin_us": -1}, "spin_us -1 is not between 0 and 1000000"),
        ({"run_as_user": 0, "run_as_group": 5}, "run_as_user 0 is not between 1 and "),
        ({"run_as_user": 5}, "run_as_user and run_as_group belong together"),
        ({"gate_argv": ()}, "gate_argv is empty"),
        ({"agent_argv": ("",)}, "agent_argv is empty"),
    ],
)
def test_what_can_not_be_meant_is_refused_with_name_and_value(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as failure:
        spec(**fields)
    assert text in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("workers", "2", "workers in the mount specification is str, not int"),
        ("workers", True, "workers in the mount specification is bool, not int"),
        ("workers", 2.0, "workers in the mount specification is float, not int"),
        ("ready_fd", "5", "ready_fd in the mount specification is str, not int or null"),
        ("fsname", None, "fsname in the mount specification is null, not str"),
        ("gate_argv", "python", "gate_argv in the mount specification is str, not a list of texts"),
        ("gate_argv", ["python", 1], "gate_argv in the mount specification is list, not a list of texts"),
        ("gate_settings", [], "gate_settings in the mount specification is list, not an object"),
        ("features", [["mount"]], "features are not a list of [name, present, masked, why]"),
        ("nonsense", 1, "the mount specification has unknown fields: nonsense"),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: Any, text: str) -> None:
    fields = json.loads(spec().to_json())
    fields[name] = value
    with pytest.raises(UsageError) as failure:
        MountSpec.from_json(json.dumps(fields))
    assert str(failure.value) == text


def test_missing_fields_are_named() -> None:
    fields = json.loads(spec().to_json())
    del fields["plan_fd"], fields["fsname"], fields["slots"]
    with pytest.raises(UsageError, match=r"^the mount specification lacks fsname, plan_fd$"):
        MountSpec.from_json(json.dumps(fields))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_in_words(content: bytes) -> None:
    with pytest.raises(UsageError):
        MountSpec.from_json(content)


def test_a_successor_needs_its_program_and_its_command() -> None:
    for fields in ({"successor_argv": ("python",)}, {"command_fd": 7}):
        with pytest.raises(UsageError, match="successor_argv and command_fd belong together"):
            spec(**fields)
    assert spec(successor_argv=("python",), command_fd=7).command_fd == 7
