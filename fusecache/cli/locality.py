"""`fusecache locality`: who holds how much of which data set, as the controller counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fusecache.cli.options import Common, everywhere, print_json
from fusecache.cli.tables import print_table

if TYPE_CHECKING:
    from fusecache.config.load import Configuration
    from fusecache.pb.locality import locality_pb2 as pb

SERVICE = "fusecache-controller.fusecache:19465"
"""The controller's Service as pods see it."""

ASK_S = 10.0

CONTROLLER_HELP = f"The controller. Else controller.address of the configuration, else {SERVICE}."

TIERS = {0: "-", 1: "block worker", 2: "node cache"}
"""Numbers of the protocol, for people."""


def controller_address(typed: str | None, configuration: Configuration) -> str:
    """The flag, else the configuration, else the Service. UsageError when it is no host:port."""
    from fusecache.config.source import parse_host_port
    from fusecache.errors import UsageError

    if typed is not None:
        try:
            parse_host_port(typed, default_port=None)
        except ValueError as failure:
            raise UsageError(f"--controller: {failure}") from None
        return typed
    return configuration.controller.address if configuration.controller is not None else SERVICE


@click.command(short_help="Show how many bytes of which data set each node holds.")
@click.argument("dataset", required=False, default="")
@click.option("--controller", metavar="HOST:PORT", help=CONTROLLER_HELP)
@everywhere
def locality(dataset: str, controller: str | None, common: Common) -> None:
    """Show DATASET (or all) by node and tier: bytes the node can serve by itself, percent of the data set, and the age
    of the node's last report. A node that was silent for three intervals counts for nothing.

    \b
    Examples:
      fusecache locality imagenet
      fusecache locality --json --controller 10.0.0.7:19465 | jq '.rows[] | select(.counts)'
    """
    from fusecache.rpc.locality_client import LocalityClient

    common.quiet_logs()
    address = controller_address(controller, common.configuration())
    with LocalityClient(address, ASK_S) as client:
        answer = client.list_locality(dataset)
    rows = [described(row) for row in answer.rows]
    if common.as_json:
        print_json({"nodes_reporting": answer.nodes_reporting, "rows": rows})
        return
    if not rows:
        what = f"data set {dataset!r}" if dataset else "a data set"
        click.echo(f"none of {answer.nodes_reporting} nodes that report knows {what}")
        return
    print_table(
        ("data set", "node", "tier", "bytes", "percent", "ready", "age", "counts"),
        [
            (
                row["dataset"],
                row["node"],
                row["tier"],
                row["size"],
                row["percent_text"],
                "yes" if row["ready"] else "no",
                f"{row['age_s']:.1f} s",
                "yes" if row["counts"] else "no",
            )
            for row in map(_with_texts, rows)
        ],
        styles={"no": "red"},
    )
    click.echo(f"{answer.nodes_reporting} nodes report")


def described(row: pb.DatasetOnNode) -> dict[str, Any]:
    """A row for programs. The percent is None while the data set is not listed whole: nobody knows what it is of."""
    percent = 100.0 * row.bytes / row.total_bytes if row.listed_whole and row.total_bytes else None
    return {
        "dataset": row.dataset,
        "node": row.node_name,
        "tier": TIERS.get(row.tier, f"tier {row.tier}"),
        "bytes": row.bytes,
        "total_bytes": row.total_bytes,
        "listed_whole": row.listed_whole,
        "percent": None if percent is None else round(percent, 1),
        "ready": row.ready,
        "age_s": row.age_ms / 1000,
        "counts": row.counts,
    }


def _with_texts(row: dict[str, Any]) -> dict[str, Any]:
    from fusecache.config.units import approximate_size

    percent = row["percent"]
    return {
        **row,
        "size": approximate_size(row["bytes"]),
        "percent_text": "-" if percent is None else f"{percent:.0f} %",
    }
