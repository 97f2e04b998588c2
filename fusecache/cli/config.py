"""`fusecache config show` and `config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, everywhere, print_json, setting_flags
from fusecache.cli.tables import print_table


@click.group(short_help="Show or check the configuration.")
def config() -> None:
    """Show or check the configuration: file, environment, flags.

    \b
    Examples:
      fusecache config show
      fusecache config check --config cluster.yaml
    """


@config.command(short_help="Every setting with its value and where it comes from.")
@click.option("--mount", "mountpoint", type=PathName("dir"), help="As this mount of the file has them.")
@setting_flags()
@everywhere
def show(mountpoint: Path | None, common: Common, flags: dict[str, Any]) -> None:
    """Print every setting, its value and its origin: default, file, variable or flag.

    \b
    Examples:
      FUSECACHE_REFRESH_S=5m fusecache config show
      fusecache config show --config cluster.yaml --mount /mnt/imagenet --json
    """
    from fusecache.errors import UsageError

    configuration = common.configuration(flags)
    settings, origins = configuration.settings, configuration.origins
    if mountpoint is not None:
        chosen = next((mount for mount in configuration.mounts if mount.mountpoint == mountpoint.absolute()), None)
        if chosen is None:
            known = ", ".join(str(mount.mountpoint) for mount in configuration.mounts) or "none"
            raise UsageError(f"--mount {str(mountpoint)!r} is not in the file's mounts; known: {known}")
        settings, origins = configuration.settings_of(chosen)
    values = settings.model_dump(mode="json")
    if common.as_json:
        print_json({key: {"value": values[key], "origin": origins[key]} for key in values})
        return
    from fusecache.config.reference import value_text

    rows = [(key, value_text(key, getattr(settings, key)), origins[key]) for key in values]
    print_table(("setting", "value", "origin"), rows)


@config.command(short_help="Check file, environment and sources; exit 2 at the first thing wrong.")
@everywhere
def check(common: Common) -> None:
    """Check the whole configuration without touching the network: keys, values, clusters, sources, data sets.

    \b
    Example:
      fusecache config check --config /etc/fusecache.yaml
    """
    configuration = common.configuration()
    plans = [configuration.plan_of(mount) for mount in configuration.mounts]
    if common.as_json:
        print_json(
            {
                "file": configuration.file,
                "clusters": sorted(configuration.clusters),
                "mounts": [str(plan.mountpoint) for plan in plans],
                "datasets": [dataset.name for dataset in configuration.datasets],
            }
        )
    else:
        click.echo(
            f"{configuration.file or 'no file'}: {len(configuration.clusters)} cluster(s), {len(plans)} mount(s), "
            f"{len(configuration.datasets)} data set(s), nothing wrong"
        )
