"""The table of settings: defaults that hold, bounds that refuse, and one entry of it all everywhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from fusecache.config import reference
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_settings_defaults_are_valid_values_themselves() -> None:
    defaults = Settings()
    assert Settings(**defaults.model_dump()) == defaults


def test_settings_state_of_a_user_without_a_home_lies_below_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user need not be in passwd; what mounts nothing (`wait`) works all the same."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: 54321)
    assert Settings().state_dir == Path("/.local/state/fusecache")
    assert Settings().runtime_dir == Path("/.local/state/fusecache/run")
    monkeypatch.setenv("HOME", "/home/alice")
    assert Settings().state_dir == Path("/home/alice/.local/state/fusecache")


def test_settings_every_field_says_what_it_is_for() -> None:
    for key, field in Settings.model_fields.items():
        assert (field.description or "").endswith("."), key


def test_settings_sizes_and_times_carry_their_unit() -> None:
    for key, field in Settings.model_fields.items():
        if field.annotation is float:
            assert key.endswith(("_s", "_per_s")), key


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.refresh_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("refresh_s", -1), ("sync_interval_s", -0.5), ("sync_interval_s", -2), ("fetch_bytes", 1),
        ("chunk_bytes", "1GiB"),
               ("data_threads", 0), ("data_threads", True), ("read_budget_s", 0), ("mode_mask", 0o1777), ("uid", -1),
        ("uid", 2**32 - 1), ("touch_calls_per_s", 0), ("refresh_calls_per_s", float("nan")), ("read_type", "CACHE"),
        ("log_level", "loud"), ("metrics_address", "9464"), ("metrics_address", "h:70000"), ("owner_map", {"a": -1}),
        ("owner_map", "alice"), ("open_mode", "gate"), ("run_as_user", 0), ("run_as_group", 0), ("run_as_user", True),
        ("run_as_user", 2**32 - 1), ("run_as_user", "alice"),
    ],
)  # fmt: skip
def test_settings_impossible_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        Settings(**{key: value})  # type: ignore[arg-type]


def test_settings_text_forms_are_accepted() -> None:
    settings = Settings(  # type: ignore[arg-type]
        **{
            "refresh_s": "5m",
            "sync_interval_s": "-1",
            "fetch_bytes": "8MiB",
            "mode_mask": "0444",
            "owner_map": "alice=1000, bob=1001",
            "immutable": "true",
            "metrics_address": "127.0.0.1:0",
        }
    )
    assert (settings.refresh_s, settings.sync_interval_s, settings.fetch_bytes) == (300.0, -1.0, 8 << 20)
    assert (settings.mode_mask, settings.owner_map, settings.immutable) == (0o444, {"alice": 1000, "bob": 1001}, True)


def test_cluster_tls_file_switches_tls_on() -> None:
    assert ClusterConfig(name="a", masters=("m1",), tls_ca_file=Path("/ca.pem")).tls
    assert not ClusterConfig(name="a", masters=("m1",)).tls


def test_cluster_certificate_without_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="belong together"):
        ClusterConfig(name="a", masters=("m1",), tls_cert_file=Path("/cert.pem"))


def test_cluster_master_without_port_gets_alluxios() -> None:
    assert ClusterConfig(name="a", masters=("m1", "m2:7")).masters == ("m1:19998", "m2:7")


def test_readme_tables_are_what_the_code_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert reference.with_tables(text) == text, "run `python -m fusecache.config.reference README.md`"


def test_reference_names_every_setting_and_metric_once() -> None:
    settings_table, metrics_table = reference.settings_table(), reference.metrics_table()
    for key in Settings.model_fields:
        rows = re.findall(rf"^\| `{key}` \|", settings_table, re.MULTILINE)
        assert rows, key
    names = re.findall(r"^\| `(fusecache_\w+)` \|", metrics_table, re.MULTILINE)
    assert len(names) == len(set(names)) == len(reference.METRICS)


def test_reference_file_without_markers_is_refused() -> None:
    with pytest.raises(UsageError, match="no markers"):
        reference.with_tables("# nothing here\n")


def test_reference_default_folders_do_not_depend_on_who_renders() -> None:
    assert str(Path.home()) not in reference.settings_table() or str(Path.home()) == "/root"
    assert "$XDG_STATE_HOME/fusecache" in reference.settings_table()
