"""The command `fusecache`: finds the sub-command, runs it, turns what it raises into one line and an exit code.

    exit 0    done
    exit 1-7  an error of `fusecache.errors`: one line `fusecache: ...` on standard error, no traceback
    exit 70   a bug: the traceback
    exit 130  Ctrl-C
    exit 141  nobody reads the output any more (`| head`)

Sub-commands are imported when they are called or asked for their own help: the list of all of them, `version` and
`completion` import nothing heavy (a test holds them to it).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import click

from fusecache.errors import UNEXPECTED, FusecacheError, UsageError, lacking, told

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

UNREAD = 141
"""128 + SIGPIPE."""

COMPLETION_VARIABLE = "_FUSECACHE_COMPLETE"
"""By which a shell's completion script asks for words (click's protocol)."""


class Command(NamedTuple):
    """Where a sub-command lives."""

    module: str
    attribute: str
    summary: str


COMMANDS: dict[str, Command] = {
    "mount": Command("mount", "mount", "Mount a path of Alluxio, or a folder, at a mount point."),
    "umount": Command("umount", "umount", "Unmount; dead and hung mounts too."),
    "serve": Command("serve", "serve", "Run all mounts of a configuration file."),
    "wait": Command("wait", "wait", "Wait until reads work on a mount."),
    "status": Command("status", "status", "Show the state of one mount, or of all."),
    "drill": Command(
        "drill", "drill", "Kill a mount's own processes while reading, and show that nothing was noticed."
    ),
    "refresh": Command("refresh", "refresh", "List folders of a mount again now, and push what changed."),
    "log-level": Command("log_level", "log_level", "Change the log level of a running mount."),
    "ls": Command("look", "ls", "List a path as Alluxio sees it: blocks, locations, percent."),
    "stat": Command("look", "stat", "Show one file or folder as Alluxio sees it."),
    "doctor": Command("doctor", "doctor", "Check machine and cluster; say what to change."),
    "embedded": Command("embedded", "embedded", "Run the embedded Alluxio-compatible server over a folder."),
    "controller": Command("controller", "controller", "Place training pods where their data is."),
    "locality": Command("locality", "locality", "Show how many bytes of which data set each node holds."),
    "explain": Command("explain", "explain", "Say why a pod was placed where it was."),
    "config": Command("config", "config", "Show or check the configuration."),
    "version": Command("version", "version", "Show the version."),
    "completion": Command("completion", "completion", "Print the completion script of a shell."),
}

HELP = """Serve data sets of Alluxio as ordinary files.

\b
Try it with a folder:       fusecache mount ./photos /mnt/photos
A path of a cluster:        fusecache mount alluxio://master:19998/imagenet /mnt/imagenet
In the background:          fusecache mount --daemon alluxio://master:19998/imagenet /mnt/imagenet
See how it goes, and end:   fusecache status /mnt/imagenet; fusecache umount /mnt/imagenet
When something is wrong:    fusecache doctor alluxio://master:19998/imagenet

Every setting is a key of the configuration file (--config), an environment variable FUSECACHE_<KEY> and, for
`mount`, a flag; flags win over variables, variables over the file. `fusecache config show` prints all with their
values and origins.
"""


class LazyGroup(click.Group):
    """Imports a sub-command's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The sub-command itself."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"fusecache.cli.{entry.module}")
        command = getattr(module, entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list for --help, from the table's summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command; a wrong name is answered with the nearest right one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`fusecache --help` lists all commands"
            raise UsageError(f"unknown command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """What `fusecache version` prints."""
    if wanted and not context.resilient_parsing:
        command = cli.get_command(context, "version")
        assert command is not None
        command.main(args=[], standalone_mode=False)
        context.exit()


@click.group(
    cls=LazyGroup, help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="As the command `version`."
)
def cli() -> None:
    """The group; everything is in its sub-commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _open_standard_streams()
    try:
        result = cli.main(
            args=words,
            prog_name="fusecache",
            complete_var=COMPLETION_VARIABLE,
            standalone_mode=False,
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except FusecacheError as failure:
        return _say(told(failure), failure.exit_code)
    except click.exceptions.NoArgsIsHelpError as failure:
        click.echo(failure.format_message(), err=True)
        return 2
    except click.ClickException as failure:
        return _say(_click_text(failure, words), 2)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit):
        # `fusecache ls ... | head`: the reader had enough. click makes a SystemExit of it, and of nothing else.
        _drop_output()
        return UNREAD
    except Exception as failure:  # noqa: BLE001 - the outermost frame: printed whole, told by the exit code
        if isinstance(failure, OSError) and (text := lacking(failure)) is not None:
            _drop_output()
            return _say(text, FusecacheError.exit_code)
        traceback.print_exc()
        return _say("this is a bug in fusecache; the traceback above says where", UNEXPECTED)


def _open_standard_streams() -> None:
    """What was closed (`>&-`) is /dev/null: otherwise the next file that is opened gets its number, and its text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _drop_output() -> None:
    """Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # standard error may be closed
        click.echo("fusecache: " + " ".join(text.split()), err=True)
    return code


def _click_text(failure: click.ClickException, words: Sequence[str]) -> str:
    """Click's own errors (a missing argument, an unknown flag) in one line, with where to read more."""
    text = failure.format_message().rstrip(".").replace(". (Did you mean", " (did you mean")
    context = failure.ctx if isinstance(failure, click.UsageError) else None
    # A flag without its value is told without a context.
    command = context.command_path if context else " ".join(["fusecache", *[w for w in words[:1] if w in COMMANDS]])
    return f"{text}; see `{command} --help`"
