"""`fusecache completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fusecache.cli.options import Common, everywhere, print_json

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL")
@everywhere
def completion(shell: str, common: Common) -> None:
    """Print the script that makes SHELL complete commands and flags of fusecache; SHELL is bash, zsh or
    fish.

    \b
    Install it:
      bash   fusecache completion bash > /etc/bash_completion.d/fusecache
      zsh    fusecache completion zsh > "${fpath[1]}/_fusecache"
      fish   fusecache completion fish > ~/.config/fish/completions/fusecache.fish
    """
    from fusecache.cli.main import COMPLETION_VARIABLE, cli

    completion_class = get_completion_class(shell)
    assert completion_class is not None  # SHELLS are click's own three
    source = completion_class(cli, {}, "fusecache", COMPLETION_VARIABLE).source()
    if common.as_json:
        print_json({"shell": shell, "script": source})
    else:
        click.echo(source)
