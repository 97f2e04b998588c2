"""Settings of the two ends of co-scheduling: the node that reports, and the controller that places.

One file may hold both: `controller:` says where the controller is (read by `serve`, `locality` and `explain`),
`placement:` how it works (read by `fusecache controller`). The same keys are variables, FUSECACHE_CONTROLLER_<KEY> and
FUSECACHE_PLACEMENT_<KEY>. Without `controller:` a node reports nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fusecache.config.settings import AbsolutePath, FrozenModel, ListenAddress, Seconds
from fusecache.config.source import parse_host_port

CONTROLLER_PORT = 19465
"""Where the controller listens unless told otherwise."""


def is_node_name(text: str) -> bool:
    """Whether Kubernetes may name a node so: a DNS subdomain."""
    return len(text) <= 253 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", text) is not None


def _node_name(value: str) -> str:
    if not is_node_name(value):
        raise ValueError("must be the name of a Kubernetes Node: up to 253 of a-z, 0-9, `-` and `.`")
    return value


def _label(value: str) -> str:
    if len(value) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value):
        raise ValueError("must be a name as Kubernetes has them: up to 63 of a-z, 0-9 and `-`")
    return value


def _target(value: str) -> str:
    parse_host_port(value, default_port=None)
    return value


NodeName = Annotated[str, AfterValidator(_node_name)]
DnsLabel = Annotated[str, AfterValidator(_label)]
Target = Annotated[str, AfterValidator(_target)]
"""host:port to connect to."""


class ControllerLink(FrozenModel):
    """`controller:`: where a node reports to, and as whom."""

    address: Target = Field(description=f"host:port of the controller's gRPC server (port {CONTROLLER_PORT}).")
    report_interval_s: Seconds = Field(
        default=5.0,
        ge=0.1,
        le=300,
        description="A report each so many seconds. The controller forgets a node after three without one.",
    )
    node_name: NodeName | None = Field(
        default=None,
        description="Name of this Kubernetes Node. Unset: the host's name. The DaemonSet gives spec.nodeName.",
    )


class PlacementConfig(FrozenModel):
    """`placement:`: how the controller works."""

    listen_address: ListenAddress = Field(
        default=f"0.0.0.0:{CONTROLLER_PORT}", description="host:port for reports and questions."
    )
    default_placement: Literal["prefer", "require"] = Field(
        default="prefer",
        description="For pods without the annotation fusecache.io/placement. `prefer`: the node is nominated, and the "
        "scheduler goes elsewhere when it can't be had; `require`: the pod runs there or waits.",
    )
    max_wait_s: Seconds = Field(
        default=60.0,
        le=86400,
        description="How long a pod may wait to be placed; then it goes on unplaced (`prefer`) or stays with the "
        "reason shown (`require`). The annotation fusecache.io/max-wait changes it for one pod.",
    )
    report_interval_s: Seconds = Field(
        default=5.0,
        ge=0.1,
        le=300,
        description="What the nodes use (`controller.report_interval_s` there); a report three times as old does not "
        "count.",
    )
    namespace: DnsLabel = Field(default="fusecache", description="Where the Lease lies.")
    lease_name: DnsLabel = Field(default="fusecache-controller", description="The Lease that the leader holds.")
    lease_duration_s: Seconds = Field(
        default=15.0, ge=3, le=300, description="A leader that did not renew for this long may be replaced."
    )
    kubeconfig: AbsolutePath | None = Field(
        default=None, description="How to reach the API server from outside. Unset: the pod's service account."
    )
