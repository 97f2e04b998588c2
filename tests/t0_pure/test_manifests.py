"""The manifests in deploy/ as text: rights, isolation, names, ports, paths and configurations that must fit each other.

No cluster and no kustomize: the files are read as they lie there. Whether a real API server takes them, and what the
two policies really do, is for tests/cluster/manifests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusecache.cli.main import COMMANDS
from fusecache.config.co_scheduling import CONTROLLER_PORT, PlacementConfig
from fusecache.config.load import Configuration, load
from fusecache.config.source import parse_host_port
from fusecache.controller import model
from fusecache.daemon import mount_process, serve, serve_http, serve_plans

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
EXAMPLES = (DEPLOY / "examples/training", DEPLOY / "examples/training-restricted")

LABEL = "fusecache.io/co-schedule"
NAMESPACE_LABEL = "fusecache.io/enabled"

Manifest = dict[str, Any]


def manifests(folder: Path) -> Iterator[Manifest]:
    """Every object of every file below a folder (no kustomizations, patches or configurations)."""
    for file in sorted(folder.rglob("*.yaml")):
        for document in documents(file):
            if isinstance(document, dict) and "kind" in document and file.name != "kustomization.yaml":
                yield document


@cache
def documents(file: Path) -> tuple[Any, ...]:
    """Everything in a file."""
    return tuple(yaml.safe_load_all(file.read_text()))


def only(folder: Path, kind: str, name: str | None = None) -> Manifest:
    """The one object of that kind (and name) below a folder."""
    (found,) = (
        document
        for document in manifests(folder)
        if document["kind"] == kind and name in (None, document["metadata"]["name"])
    )
    return found


def pod_specs() -> list[tuple[str, Manifest]]:
    """(kind/namespace folder, pod spec) of every workload."""
    found = []
    for folder in (BASE, *EXAMPLES):
        for document in manifests(folder):
            if document["kind"] in ("DaemonSet", "Deployment", "Job"):
                found.append((f"{folder.name}/{document['kind']}", document["spec"]["template"]["spec"]))
    return found


def containers() -> list[tuple[str, Manifest, Manifest]]:
    """(where, container, its pod spec) of every container and init container."""
    return [
        (f"{where}/{container['name']}", container, spec)
        for where, spec in pod_specs()
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    ]


NODE_POD: Manifest = only(BASE, "DaemonSet")["spec"]["template"]["spec"]
NODE: Manifest = NODE_POD["containers"][0]
CONTROLLER_POD: Manifest = only(BASE, "Deployment")["spec"]["template"]["spec"]
CONTROLLER: Manifest = CONTROLLER_POD["containers"][0]


def configuration(container: Manifest) -> Configuration:
    """As the program in the container reads it: its file, and its variables with what the API server fills in."""
    *_, flag, path = container["args"]
    assert flag == "--config"
    assert Path(path).parent == Path("/etc/fusecache")
    variables = {}
    for variable in container.get("env", ()):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        variables[variable["name"]] = variable["value"] if field is None else {"spec.nodeName": "gpu-node-7"}[field]
    return load(BASE / "config" / Path(path).name, variables, {})


# --- everything is there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kustomization", sorted(DEPLOY.rglob("kustomization.yaml")), ids=lambda file: file.parent.name)
def test_kustomization_lists_every_file_beside_it_and_nothing_else(kustomization: Path) -> None:
    document = yaml.safe_load(kustomization.read_text())
    listed = set(document.get("resources", ()))
    listed |= {patch["path"] for patch in document.get("patches", ()) if "path" in patch}
    listed |= {
        entry.rpartition("=")[2] for made in document.get("configMapGenerator", ()) for entry in made.get("files", ())
    }
    folders = {name for name in listed if (kustomization.parent / name).is_dir()} | set(document.get("components", ()))
    beside = {str(file.relative_to(kustomization.parent)) for file in kustomization.parent.rglob("*.yaml")}
    assert listed - folders == beside - {"kustomization.yaml"}
    for folder in folders:
        assert (kustomization.parent / folder / "kustomization.yaml").is_file(), folder


def test_every_file_is_an_object_a_patch_or_a_configuration() -> None:
    others = {BASE / "config/node.yaml", BASE / "config/controller.yaml", DEPLOY / "overlays/example/node.yaml"}
    others.add(DEPLOY / "overlays/test/images-of-this-machine.yaml")
    for file in set(DEPLOY.rglob("*.yaml")) - others:
        if file.name != "kustomization.yaml":
            for document in documents(file):
                assert {"apiVersion", "kind", "metadata"} <= set(document), file


# --- rights ------------------------------------------------------------------------------------------------------

ALLOWED = {
    ("ClusterRole", "fusecache-controller-reads", "", "pods", "", "get list watch"),
    ("ClusterRole", "fusecache-controller-reads", "", "nodes", "", "get list watch"),
    ("ClusterRole", "fusecache-controller-places", "", "pods", "", "patch"),
    ("ClusterRole", "fusecache-controller-places", "", "pods/status", "", "patch"),
    ("ClusterRole", "fusecache-controller-places", "", "events", "", "create"),
    ("Role", "fusecache-controller-lease", "coordination.k8s.io", "leases", "fusecache-controller", "get update"),
    ("Role", "fusecache-controller-lease", "coordination.k8s.io", "leases", "", "create"),
}
"""(kind, role, API group, resource, the only names it is for, verbs): all that anybody is given."""

BOUND = {
    ("ClusterRoleBinding", "fusecache-controller-reads", "ClusterRole", "fusecache-controller-reads", None),
    ("RoleBinding", "fusecache-controller-lease", "Role", "fusecache-controller-lease", "fusecache"),
    # Without a namespace of its own: the kustomization of a namespace that opts in gives it.
    ("RoleBinding", "fusecache-controller-places", "ClusterRole", "fusecache-controller-places", None),
}


def test_roles_allow_exactly_this() -> None:
    found = set()
    for document in manifests(DEPLOY):
        if document["kind"] in ("Role", "ClusterRole"):
            assert set(document) == {"apiVersion", "kind", "metadata", "rules"}  # no aggregation
            for rule in document["rules"]:
                assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        names = " ".join(sorted(rule.get("resourceNames", ())))
                        verbs = " ".join(sorted(rule["verbs"]))
                        role = document["metadata"]["name"]
                        found.add((document["kind"], role, group, resource, names, verbs))
    assert found == ALLOWED


def test_no_generated_name_stands_in_a_role() -> None:
    """kustomize takes it for a reference and adds the hash: the role is then for a Lease that does not exist."""
    generated = set()
    for file in DEPLOY.rglob("kustomization.yaml"):
        for made in yaml.safe_load(file.read_text()).get("configMapGenerator", ()):
            generated.add(made["name"])
    assert generated == {config_map_of(NODE_POD), config_map_of(CONTROLLER_POD)}
    assert generated.isdisjoint({name for _, _, _, _, names, _ in ALLOWED for name in names.split()})


def config_map_of(spec: Manifest) -> str:
    (name,) = (volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume)
    return str(name)


def test_roles_are_bound_to_the_controller_alone_and_nowhere_else() -> None:
    found = set()
    for document in manifests(DEPLOY):
        if document["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            assert document["subjects"] == [{"kind": "ServiceAccount", "name": "controller", "namespace": "fusecache"}]
            metadata, role = document["metadata"], document["roleRef"]
            found.add((document["kind"], metadata["name"], role["kind"], role["name"], metadata.get("namespace")))
    assert found == BOUND


def test_only_the_controller_gets_a_token() -> None:
    for account in manifests(DEPLOY):
        if account["kind"] == "ServiceAccount":
            assert account["automountServiceAccountToken"] is False
    for where, spec in pod_specs():
        assert spec["automountServiceAccountToken"] is (where == "base/Deployment"), where
    assert CONTROLLER_POD["serviceAccountName"] == "controller"
    assert NODE_POD["serviceAccountName"] == "node"


# --- isolation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "container", "spec"), containers(), ids=[where for where, _, _ in containers()])
def test_container_has_resources_and_as_few_rights_as_it_can(where: str, container: Manifest, spec: Manifest) -> None:
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    for name in ("hostPID", "hostIPC", "shareProcessNamespace"):
        assert name not in spec
    if where == "base/DaemonSet/node":
        assert context["privileged"] is True  # Bidirectional is admitted in no other container
        return
    assert spec.get("hostNetwork", False) is False
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in context
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_bidirectional_propagation_is_asked_for_once() -> None:
    asking = [
        (where, mount["name"])
        for where, container, _ in containers()
        for mount in container.get("volumeMounts", ())
        if mount.get("mountPropagation") == "Bidirectional"
    ]
    assert asking == [("base/DaemonSet/node", "mounts")]


def test_probes_never_touch_a_mount() -> None:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    # Whether a mount still starts is for /readyz to say, whether a loop hangs for /healthz.
    assert {probe: CONTROLLER[probe]["httpGet"] for probe in probes} == {
        "startupProbe": {"path": "/healthz", "port": "status"},
        "livenessProbe": {"path": "/healthz", "port": "status"},
        "readinessProbe": {"path": "/readyz", "port": "status"},
    }
    # On the host's network the port belongs to the pod that has the mounts, which is not always the one that is asked.
    ready = {"command": ["test", "-e", NODE["args"][NODE["args"].index("--ready-file") + 1]]}
    assert NODE["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 9464}
    assert NODE["startupProbe"]["exec"] == NODE["readinessProbe"]["exec"] == ready
    (folder,) = (mount for mount in NODE["volumeMounts"] if mount["name"] == "ready")
    assert ready["command"][-1] == folder["mountPath"] + "/ready"
    (volume,) = (volume for volume in NODE_POD["volumes"] if volume["name"] == "ready")
    assert "emptyDir" in volume, "not another pod's"
    # A mount that does not answer must be what /healthz says, not what the kubelet gave up waiting for.
    for probe in probes:
        assert NODE[probe]["timeoutSeconds"] > serve_http.ASK_S


def test_node_pod_has_time_to_end_its_mounts_before_it_is_killed() -> None:
    assert NODE_POD["terminationGracePeriodSeconds"] > mount_process.STOP_S + serve.PROBE_S


def test_node_pods_are_replaced_one_beside_the_other() -> None:
    rolling = {"maxSurge": 1, "maxUnavailable": 0}
    assert only(BASE, "DaemonSet")["spec"]["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    assert NODE_POD["hostNetwork"]
    assert "ports" not in NODE, "each would be a port of the host, which the second pod could not have"
    assert "--stay" in NODE["args"], "a container that ends is started again, and would take its mounts back"


# --- names, ports, paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "container", "spec"), containers(), ids=[where for where, _, _ in containers()])
def test_container_runs_a_command_that_exists(where: str, container: Manifest, spec: Manifest) -> None:
    assert container["image"] == "fusecache"
    if "args" in container:  # of the image's entry point
        assert container["args"][0] in COMMANDS
        assert "command" not in container


def test_configurations_load_and_their_plans_can_be_made() -> None:
    node, controller = configuration(NODE), configuration(CONTROLLER)
    assert list(serve_plans.plans(node)) == [mount.mountpoint for mount in node.mounts]
    assert node.controller is not None
    assert node.controller.node_name == "gpu-node-7"
    assert controller.controller is None
    assert not controller.mounts


def test_the_configuration_to_copy_is_the_one_of_the_base() -> None:
    copied, ours = DEPLOY / "overlays/example/node.yaml", BASE / "config/node.yaml"
    assert yaml.safe_load(copied.read_text()) == yaml.safe_load(ours.read_text())


def test_ports_agree() -> None:
    node, controller = configuration(NODE), configuration(CONTROLLER)
    ports = {port["name"]: port["containerPort"] for port in CONTROLLER["ports"]}
    service = only(BASE, "Service")
    assert ports["locality"] == CONTROLLER_PORT
    assert parse_host_port(controller.placement.listen_address) == ("0.0.0.0", ports["locality"])
    assert controller.settings.metrics_address == f"0.0.0.0:{ports['status']}"
    assert [(port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [(CONTROLLER_PORT, "locality")]
    assert node.controller is not None
    assert node.controller.address == (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{CONTROLLER_PORT}"
    )
    # The kubelet asks the pod's address, which on the host's network is the node's: not loopback.
    status = NODE["livenessProbe"]["httpGet"]["port"]
    assert node.settings.metrics_address == f"0.0.0.0:{status}"
    assert status != ports["status"], "both may run on one host's network"


def test_service_and_policies_select_the_pods_of_the_deployment() -> None:
    labels = only(BASE, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert only(BASE, "Service")["spec"]["selector"].items() <= labels.items()
    policy = only(DEPLOY / "components/network-policy", "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    named = {port["name"] for port in CONTROLLER["ports"]}
    assert {port["port"] for port in policy["spec"]["ingress"][0]["ports"]} == named


def test_lease_has_one_name_everywhere() -> None:
    placement = configuration(CONTROLLER).placement
    assert (placement.namespace, placement.lease_name) == (PlacementConfig().namespace, PlacementConfig().lease_name)
    parameter = only(BASE, "MutatingAdmissionPolicyBinding")["spec"]["paramRef"]
    assert (parameter["namespace"], parameter["name"]) == (placement.namespace, placement.lease_name)
    assert parameter["parameterNotFoundAction"] == "Allow"
    rule = only(BASE, "Role")["rules"][0]
    assert rule["resourceNames"] == [placement.lease_name]
    assert only(BASE, "Role")["metadata"]["namespace"] == placement.namespace


def test_policies_name_the_gate_the_labels_and_the_account() -> None:
    gate = only(BASE, "MutatingAdmissionPolicy")["spec"]
    (mutation,) = gate["mutations"]
    assert f"'{model.GATE}'" in mutation["applyConfiguration"]["expression"]
    assert gate["matchConstraints"]["objectSelector"]["matchLabels"] == {LABEL: "true"}
    assert gate["failurePolicy"] == "Ignore"
    binding = only(BASE, "MutatingAdmissionPolicyBinding")["spec"]
    assert binding["matchResources"]["namespaceSelector"]["matchLabels"] == {NAMESPACE_LABEL: "true"}

    fence = only(BASE, "ValidatingAdmissionPolicy")["spec"]
    (condition,) = fence["matchConditions"]
    account = only(BASE, "ServiceAccount", CONTROLLER_POD["serviceAccountName"])["metadata"]
    assert condition["expression"] == (
        f"request.userInfo.username == 'system:serviceaccount:{account['namespace']}:{account['name']}'"
    )
    assert fence["failurePolicy"] == "Fail"
    text = str(fence)
    assert f"'{model.GATE}'" in text
    # What the pod's owner asks for is not the controller's to change.
    for annotation in (model.DATASETS, model.PLACEMENT, model.MAX_WAIT):
        assert f"'{annotation}'" in text
    assert f"'{model.DECISION}'" not in text
    assert only(BASE, "ValidatingAdmissionPolicyBinding")["spec"]["validationActions"] == ["Deny"]


def test_paths_of_the_node_configuration_are_volumes_of_its_pod() -> None:
    node = configuration(NODE)
    host = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in NODE_POD["volumes"]}
    mounted = {mount["name"]: mount for mount in NODE["volumeMounts"]}
    assert set(mounted) == set(host)
    for name in ("mounts", "state", "runtime", "fuse-device", "read-ahead"):
        assert mounted[name]["mountPath"] == host[name], "the same path inside and outside"
    for mount in node.mounts:
        assert mount.mountpoint.parent == Path(mounted["mounts"]["mountPath"])
    assert node.settings.state_dir == Path(mounted["state"]["mountPath"])
    assert node.settings.runtime_dir == Path(mounted["runtime"]["mountPath"])
    assert mounted["tier"]["readOnly"] is True
    (cluster,) = node.clusters.values()
    assert cluster.tier_folders == (mounted["tier"]["mountPath"],)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_example_waits_for_a_data_set_that_the_node_mounts(folder: Path) -> None:
    node = configuration(NODE)
    job = only(folder, "Job")["spec"]["template"]
    assert job["metadata"]["labels"] == {LABEL: "true"}
    named = job["metadata"]["annotations"][model.DATASETS].split(",")
    assert set(named) <= {dataset.name for dataset in node.datasets}

    (init,) = job["spec"]["initContainers"]
    (main,) = job["spec"]["containers"]
    assert init["args"][0] == "wait"
    (mount,) = init["volumeMounts"]
    assert main["volumeMounts"] == [mount]
    assert mount["mountPropagation"] == "HostToContainer"
    assert mount["readOnly"] is True
    inside = Path(init["args"][1]).relative_to(mount["mountPath"])

    # The folder above the mounts is what the pod gets: a mount that replaces a dead one is seen through it only.
    if folder.name == "training":
        path = job["spec"]["volumes"][0]["hostPath"]["path"]
    else:
        claim, volume = only(folder, "PersistentVolumeClaim"), only(folder, "PersistentVolume")
        used = job["spec"]["volumes"][0]["persistentVolumeClaim"]
        assert used == {"claimName": claim["metadata"]["name"], "readOnly": True}
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadOnlyMany"]
        assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
        namespace = only(folder, "Namespace")["metadata"]["name"]
        assert volume["spec"]["claimRef"] == {"name": claim["metadata"]["name"], "namespace": namespace}
        assert "nodeAffinity" not in volume["spec"]
        path = volume["spec"]["hostPath"]["path"]
    assert Path(path) / inside in {mount.mountpoint for mount in node.mounts}
