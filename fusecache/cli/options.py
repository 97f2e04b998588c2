"""Flags that commands share: those of every command, and those made from the table of settings.

`everywhere` gives a command `common` (--json, --config, --log-level); `setting_flags` and `cluster_flags` give it
`flags`, key -> what was typed, for `config.load`. Values are not checked here: `config.load` does, and names the flag.
"""

from __future__ import annotations

import functools
import json
import os
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from fusecache.cli.arguments import PathName

if TYPE_CHECKING:
    from fusecache.config.load import Configuration
    from fusecache.config.settings import LogLevel

Function = TypeVar("Function", bound=Callable[..., Any])

LEVELS = ("debug", "info", "warning", "error")


class Common(NamedTuple):
    """What every command takes."""

    as_json: bool
    config: Path | None
    log_level: LogLevel | None

    def configuration(self, flags: dict[str, Any] | None = None) -> Configuration:
        """File, environment and flags together. UsageError names what is wrong."""
        from fusecache.config.load import load

        return load(self.config, os.environ, self.given(flags))

    def given(self, flags: dict[str, Any] | None = None) -> dict[str, Any]:
        """`flags` with those of every command that are settings."""
        return {**(flags or {}), **({} if self.log_level is None else {"log_level": self.log_level})}

    def quiet_logs(self) -> None:
        """Logging of a command that ends soon: errors only, unless --log-level asks for more."""
        from fusecache import logs

        logs.configure(self.log_level or "error")


def everywhere(function: Function) -> Function:
    """--json, --config and --log-level, as the parameter `common`."""

    @functools.wraps(function)
    def with_common(*args: Any, as_json: bool, config: Path | None, log_level: LogLevel | None, **kwargs: Any) -> Any:
        return function(*args, common=Common(as_json, config, log_level), **kwargs)

    for option in (
        click.option("--log-level", type=click.Choice(LEVELS), help="Least severe events that are logged."),
        click.option(
            "--config",
            type=PathName(),
            metavar="FILE",
            help="Configuration file (YAML); else the variable FUSECACHE_CONFIG.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON for programs."),
    ):
        with_common = option(with_common)
    return typing.cast(Function, with_common)


def setting_flags(keys: Iterable[str] | None = None) -> Callable[[Function], Function]:
    """A flag per key of `Settings` (None = all but log_level, which is everywhere), as the parameter `flags`."""
    from fusecache.config.settings import Settings

    chosen = [key for key in Settings.model_fields if key != "log_level"] if keys is None else list(keys)
    return lambda function: _with_flags(function, Settings, chosen)


def cluster_flags(function: Function) -> Function:
    """A flag per key of a cluster but its name and masters, as the parameter `flags`."""
    from fusecache.config.load import CLUSTER_KEYS
    from fusecache.config.settings import ClusterConfig

    return _with_flags(function, ClusterConfig, CLUSTER_KEYS)


def print_json(value: Any) -> None:
    """One document on standard output; bytes and paths as text."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """One document; bytes and paths as text."""
    return json.dumps(value, indent=2, default=_as_text)


def as_text(value: bytes) -> str:
    """A name for people: what is no UTF-8 is shown as \\xff."""
    return value.decode("utf-8", "backslashreplace")


def _as_text(value: Any) -> str:
    return as_text(value) if isinstance(value, bytes) else str(value)


def _with_flags(function: Function, model: Any, keys: Iterable[str]) -> Function:
    from fusecache.config.load import flag_name

    own = list(keys)

    @functools.wraps(function)
    def with_flags(*args: Any, flags: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        given = {key: value for key in own if (value := kwargs.pop(f"flag_{key}")) not in (None, ())}
        return function(*args, flags={**given, **(flags or {})}, **kwargs)

    for key in reversed(own):
        field = model.model_fields[key]
        with_flags = _option(key, flag_name(key), field)(with_flags)
    return typing.cast(Function, with_flags)


def _option(key: str, flag: str, field: Any) -> Callable[[Any], Any]:
    """The click option of one field; always unset by default, so that file and environment count."""
    from fusecache.config.reference import default_text

    help_text = f"{field.description} [default: {default_text(field, key)}]".replace("`", "")
    kinds = _alternatives(field.annotation)
    name = f"flag_{key}"
    if bool in kinds:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=help_text)
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    if choices:
        return click.option(flag, name, type=click.Choice(choices), help=help_text)
    multiple = any(typing.get_origin(kind) is tuple for kind in kinds)
    return click.option(flag, name, metavar=_metavar(key, kinds), multiple=multiple, help=help_text)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """`X | None` -> (X, NoneType); anything else -> itself."""
    arguments = typing.get_args(annotation)
    return arguments if type(None) in arguments else (annotation,)


def _metavar(key: str, kinds: tuple[Any, ...]) -> str:
    if key.endswith("_bytes"):
        return "SIZE"
    if key.endswith("_per_s"):
        return "NUMBER"
    if key.endswith("_s"):
        return "DURATION"
    if key.endswith(("_dir", "_folders")):
        return "FOLDER"
    if key.endswith("_file"):
        return "FILE"
    if key.endswith("_map"):
        return "NAME=ID,..."
    if key.endswith("_address"):
        return "HOST:PORT"
    if key == "mode_mask":
        return "OCTAL"
    if key == "node_hosts":
        return "HOST"
    return "NUMBER" if int in kinds else "NAME"
