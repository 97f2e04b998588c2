"""`fusecache controller`: what the Deployment runs."""

from __future__ import annotations

from pathlib import Path

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, everywhere, print_json


@click.command(short_help="Place training pods where their data is.")
@click.option(
    "--kubeconfig",
    type=PathName(),
    metavar="FILE",
    help="How to reach the API server from outside; else the pod's service account. Wins over placement.kubeconfig.",
)
@everywhere
def controller(kubeconfig: Path | None, common: Common) -> None:
    """Run the controller until a signal ends it: nodes report to it, pods with the gate fusecache.io/locality are
    directed to the node that holds most of their data, and let go.

    Settings are the keys of `placement:` in the configuration file, and FUSECACHE_PLACEMENT_<KEY>. With
    `metrics_address`, /metrics, /healthz and /readyz are served there; only the instance that leads is ready.

    \b
    Example:
      fusecache controller --config /etc/fusecache/controller.yaml
    \b
    with
      metrics_address: 0.0.0.0:9464
      placement: {max_wait_s: 2m, report_interval_s: 5s}
    """
    from fusecache import logs
    from fusecache.controller import main

    configuration = common.configuration()
    settings = configuration.settings
    logs.configure(settings.log_level, settings.log_format)
    placement = configuration.placement
    if kubeconfig is not None:
        placement = placement.model_copy(update={"kubeconfig": kubeconfig.absolute()})

    def ready(address: str) -> None:
        if common.as_json:
            print_json({"listening": address})
        else:
            click.echo(f"listening on {address}")

    main.run(placement, settings.metrics_address, ready)
