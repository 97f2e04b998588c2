"""`fusecache drill`."""

from __future__ import annotations

from pathlib import Path

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, everywhere, print_json, setting_flags
from fusecache.cli.tables import print_table
from fusecache.errors import MountError

ASK_S = 5.0
PARTS = ("worker", "agent", "gate")


@click.command(short_help="Kill a mount's own processes while reading, and show that nothing was noticed.")
@click.argument("mountpoint", type=PathName("dir"))
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    default=("worker",),
    show_default=True,
    help="Which processes are killed; may be given several times.",
)
@click.option(
    "--kills",
    type=click.IntRange(1, 1000),
    default=4,
    show_default=True,
    help="How many, one by one; kinds take turns.",
)
@setting_flags(("runtime_dir",))
@everywhere
def drill(mountpoint: Path, parts: tuple[str, ...], kills: int, common: Common, flags: dict[str, object]) -> None:
    """Kill processes of the mount at MOUNTPOINT while reading its files, and show what a reader notices: a pause.

    Only the start of up to 64 files is read, and compared with its first reading. For root and the user who mounted,
    where the daemon runs (in its pod). Exit 3 when a read failed or gave other bytes.

    \b
    Examples:
      fusecache drill /mnt/imagenet
      fusecache drill /mnt/imagenet --part worker --part agent --part gate --kills 12
    """
    from fusecache.daemon import control_client
    from fusecache.daemon import drill as drills
    from fusecache.daemon.mountpoint import find_mount, is_ours

    runtime_dir = common.configuration(flags).settings.runtime_dir
    mounted = find_mount(mountpoint)
    if mounted is None or not is_ours(mounted):
        raise MountError(f"{str(mountpoint)!r} is no mount of fusecache; `fusecache status` lists them")

    def tell(kill: drills.Kill) -> None:
        if not common.as_json:
            click.echo(f"{kill.part} (process {kill.pid}) was killed, and back after {kill.back_s:.2f} s", err=True)

    def ask() -> dict[str, object]:
        return control_client.ask(mounted, runtime_dir, "status", ASK_S)

    report = drills.run(mountpoint.resolve(), ask, parts, kills, tell)
    if common.as_json:
        print_json(
            {
                "mountpoint": mountpoint,
                "kills": [
                    {"part": kill.part, "pid": kill.pid, "back_s": round(kill.back_s, 3), "pause_s": round(pause_s, 3)}
                    for kill, pause_s in zip(report.kills, report.pauses_s, strict=True)
                ],
                "reads": report.reads,
                "longest_quiet_s": round(report.longest_quiet_s, 3),
                "errors": report.errors,
            }
        )
    else:
        rows = [
            (kill.part, str(kill.pid), f"{kill.back_s:.2f} s", f"{pause_s:.3f} s")
            for kill, pause_s in zip(report.kills, report.pauses_s, strict=True)
        ]
        print_table(("killed", "process", "back after", "longest read"), rows)
        click.echo(
            f"{report.reads} reads, {len(report.errors)} failed or different; "
            f"longest undisturbed read {report.longest_quiet_s:.3f} s"
        )
    if report.errors:
        raise MountError(
            f"{len(report.errors)} of {report.reads} reads failed or differed: "
            + "; ".join(report.errors[: drills.MOST_TOLD])
        )
