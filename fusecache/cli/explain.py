"""`fusecache explain pod`: why a pod was, or would be, placed where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fusecache.cli.locality import ASK_S, CONTROLLER_HELP, controller_address
from fusecache.cli.options import Common, everywhere, print_json
from fusecache.cli.tables import print_table

if TYPE_CHECKING:
    from fusecache.pb.locality import locality_pb2 as pb

MAX_SHOWN = 30
"""Rows of the table; --json shows all."""


@click.group(short_help="Say why a pod was placed where it was.")
def explain() -> None:
    """Say why something was decided as it was.

    \b
    Example:
      fusecache explain pod train-0 -n research
    """


@explain.command(short_help="Why a pod is where it is, or what it waits for.")
@click.argument("name")
@click.option("-n", "--namespace", default="default", show_default=True, help="The pod's namespace.")
@click.option("--controller", metavar="HOST:PORT", help=CONTROLLER_HELP)
@everywhere
def pod(name: str, namespace: str, controller: str | None, common: Common) -> None:
    """Show state and reason of pod NAME, and every node that was looked at: feasible ones first, most bytes first.

    \b
    Example:
      fusecache explain pod train-0 -n research
    """
    from fusecache.rpc.locality_client import LocalityClient

    common.quiet_logs()
    address = controller_address(controller, common.configuration())
    with LocalityClient(address, ASK_S) as client:
        answer = client.explain_pod(namespace, name)
    if common.as_json:
        print_json(described(answer))
        return
    for key, value in (
        ("pod", f"{answer.namespace}/{answer.pod}"),
        ("state", answer.state),
        ("reason", answer.reason),
        ("placement", answer.placement),
        ("data sets", ", ".join(answer.datasets) or "-"),
        ("node", answer.node_name or "-"),
    ):
        click.echo(f"{key:<10} {value}")
    if answer.candidates:
        _print_candidates(answer)


def described(answer: pb.ExplainPodResponse) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "namespace": answer.namespace,
        "pod": answer.pod,
        "uid": answer.uid,
        "state": answer.state,
        "reason": answer.reason,
        "placement": answer.placement,
        "datasets": list(answer.datasets),
        "node": answer.node_name or None,
        "candidates": [
            {
                "node": candidate.node_name,
                "feasible": candidate.feasible,
                "refused_because": candidate.refused_because or None,
                "bytes": candidate.bytes,
                "report_age_s": candidate.report_age_ms / 1000 if candidate.HasField("report_age_ms") else None,
            }
            for candidate in answer.candidates
        ],
    }


def _print_candidates(answer: pb.ExplainPodResponse) -> None:
    from fusecache.config.units import approximate_size

    click.echo()
    print_table(
        ("node", "bytes", "report", "verdict"),
        [
            (
                candidate.node_name,
                approximate_size(candidate.bytes),
                f"{candidate.report_age_ms / 1000:.1f} s ago" if candidate.HasField("report_age_ms") else "never",
                "feasible" if candidate.feasible else candidate.refused_because,
            )
            for candidate in answer.candidates[:MAX_SHOWN]
        ],
        styles={"feasible": "green"},
    )
    if len(answer.candidates) > MAX_SHOWN:
        click.echo(f"{len(answer.candidates) - MAX_SHOWN} more; --json shows all")
