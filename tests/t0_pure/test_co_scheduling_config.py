"""`controller:` and `placement:`: where the keys come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusecache.config.load import load
from fusecache.errors import UsageError


def write(folder: Path, text: str) -> Path:
    file = folder / "node.yaml"
    file.write_text(text)
    return file


def test_controller_without_section_reports_nowhere(tmp_path: Path) -> None:
    configuration = load(write(tmp_path, "log_level: info\n"), {}, {})
    assert configuration.controller is None
    assert configuration.placement.listen_address == "0.0.0.0:19465"


def test_controller_in_the_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    link = load(write(tmp_path, "controller: {address: 'c:1', node_name: n1}\n"), {}, {}).controller
    assert link is not None
    assert (link.address, link.report_interval_s, link.node_name) == ("c:1", 5.0, "n1")


def test_controller_variable_stands_above_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "controller: {address: 'c:1'}\n")
    variables = {"FUSECACHE_CONTROLLER_NODE_NAME": "n7", "FUSECACHE_CONTROLLER_REPORT_INTERVAL_S": "2s"}
    link = load(file, variables, {}).controller
    assert link is not None
    assert (link.node_name, link.report_interval_s) == ("n7", 2.0)


def test_placement_variable_without_a_file_is_taken() -> None:
    assert load(None, {"FUSECACHE_PLACEMENT_MAX_WAIT_S": "5m"}, {}).placement.max_wait_s == 300.0


def test_variables_of_a_kubernetes_service_are_not_ours() -> None:
    variables = {
        "FUSECACHE_CONTROLLER_SERVICE_HOST": "10.0.0.7",
        "FUSECACHE_CONTROLLER_PORT_19465_TCP_ADDR": "10.0.0.7",
        "FUSECACHE_CONTROLLER_PORT": "tcp://10.0.0.7:19465",
    }
    assert load(None, variables, {}).controller is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("controller: 7\n", "controller: 7: must be a mapping"),
        ("controller: {}\n", "controller: address is missing"),
        ("controller: {address: nowhere}\n", "controller: address: 'nowhere'"),
        ("controller: {address: 'c:1', adress: 'c:2'}\n", "did you mean 'address'"),
        ("controller: {address: 'c:1', report_interval_s: 0}\n", "report_interval_s: 0: must be at least 100ms"),
        ("controller: {address: 'c:0'}\n", "'0' in 'c:0' is not a port; allowed: 1 to 65535"),
        (
            "controller: {address: 'c:1', node_name: 'Node_1'}\n",
            "node_name: 'Node_1': must be the name of a Kubernetes Node",
        ),
        ("placement: {namespace: 'A B'}\n", "namespace: 'A B': must be a name as Kubernetes has them"),
        ("placement: {default_placement: always}\n", "allowed: 'prefer' or 'require'"),
        ("placement: {lease_duration_s: 1}\n", "lease_duration_s: 1"),
    ],
)
def test_section_that_is_wrong_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(write(tmp_path, text), {}, {})
    assert said in str(caught.value)
    assert "node.yaml" in str(caught.value)


def test_controller_variable_that_is_wrong_is_named() -> None:
    with pytest.raises(UsageError, match=r"^FUSECACHE_PLACEMENT_DEFAULT_PLACEMENT 'maybe': allowed"):
        load(None, {"FUSECACHE_PLACEMENT_DEFAULT_PLACEMENT": "maybe"}, {})


def test_value_of_the_file_is_blamed_on_the_file_when_a_variable_gives_another_key(tmp_path: Path) -> None:
    file = write(tmp_path, "controller: {address: nowhere}\n")
    with pytest.raises(UsageError, match=r"node\.yaml: controller: address: 'nowhere'"):
        load(file, {"FUSECACHE_CONTROLLER_NODE_NAME": "n1"}, {})


def test_node_name_alone_does_not_make_a_node_report(tmp_path: Path) -> None:
    """The DaemonSet gives it to every pod; without `controller:` nothing is reported, and nothing is wrong."""
    file = write(tmp_path, "log_level: info\n")
    assert load(file, {"FUSECACHE_CONTROLLER_NODE_NAME": "n1"}, {}).controller is None
    variables = {"FUSECACHE_CONTROLLER_NODE_NAME": "n1", "FUSECACHE_CONTROLLER_ADDRESS": "c:1"}
    link = load(file, variables, {}).controller
    assert link is not None
    assert (link.address, link.node_name) == ("c:1", "n1")
