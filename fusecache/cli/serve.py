"""`fusecache serve`: what the DaemonSet runs."""

from __future__ import annotations

from pathlib import Path

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, everywhere, print_json


@click.command(short_help="Run all mounts of a configuration file.")
@click.option(
    "--stay",
    is_flag=True,
    help="When another serve has taken all mounts over, wait for the signal to end: for where what ends is restarted.",
)
@click.option(
    "--ready-file",
    type=PathName(),
    metavar="FILE",
    help="A file that is there while all mounts serve reads: for probes where two of these share an address.",
)
@everywhere
def serve(stay: bool, ready_file: Path | None, common: Common) -> None:
    """Run every mount of the configuration file until a signal ends them; one process per mount.

    SIGHUP reads the file again, unless there is a terminal that the signal may come from: mounts whose settings changed
    go on with the new ones, new mounts are added and missing ones ended; metrics_address and controller are the file's
    too. A file that is wrong changes nothing.

    Mounts that another fusecache serves already are taken over from it, without a failed read; a serve whose mounts
    were all taken over ends with 0.

    With `metrics_address` in the file, /metrics (all mounts, told apart by the label `mount`), /healthz and /readyz are
    served there. When one mount dies, all are stopped and the exit code is not 0.

    \b
    Example:
      fusecache serve --config /etc/fusecache.yaml
    \b
    with
      metrics_address: 0.0.0.0:9464
      clusters:
        - {name: train, masters: [m1, m2], user: alice}
      mounts:
        - {source: "train:/imagenet", mountpoint: /mnt/imagenet, immutable: true}
        - {source: "train:/coco", mountpoint: /mnt/coco}
    """
    from fusecache import logs
    from fusecache.daemon import serve as daemon_serve

    configuration = common.configuration()
    logs.configure(configuration.settings.log_level, configuration.settings.log_format)

    def ready() -> None:
        if common.as_json:
            print_json({"ready": [str(mount.mountpoint) for mount in configuration.mounts]})
        else:
            click.echo(f"all {len(configuration.mounts)} mounts of {configuration.file} are ready")

    daemon_serve.run(configuration, ready, common.configuration, stays=stay, ready_file=ready_file)
