"""`fusecache version`."""

from __future__ import annotations

import json
import platform

import click

import fusecache
from fusecache.cli.options import Common, everywhere


@click.command(short_help="Show the version.")
@everywhere
def version(common: Common) -> None:
    """Show the version of fusecache and of what it runs on.

    \b
    Example:  fusecache version --json
    """
    if common.as_json:
        click.echo(
            json.dumps(
                {"version": fusecache.__version__, "python": platform.python_version(), "kernel": platform.release()}
            )
        )
    else:
        click.echo(
            f"fusecache {fusecache.__version__} (Python {platform.python_version()}, Linux {platform.release()})"
        )
