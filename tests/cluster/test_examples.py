"""The examples of deploy/ on a real node, as they are but for this cluster's image and mount."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import yaml

from tests.cluster import image, node
from tests.cluster.api import pods
from tests.cluster.installation import DEPLOY, MOUNT, MOUNTS, NAMESPACE, training_pod
from tests.cluster.stories import Stories, sums_of

pytestmark = pytest.mark.timeout(600)

IN_POD = f"/mnt/fusecache/{MOUNT}"


def ours(example: str, folder: Path) -> Path:
    """A kustomization on top of an example: the image of this checkout, and the mount that this cluster's node has."""
    name, _, tag = image.NAME.rpartition(":")
    values = {
        "initContainers/0/imagePullPolicy": "Never",
        "containers/0/imagePullPolicy": "Never",
        "initContainers/0/args/1": IN_POD,
        "containers/0/command/1": f"{IN_POD}/imagenet",
    }
    operations = [
        {"op": "replace", "path": f"/spec/template/spec/{path}", "value": value} for path, value in values.items()
    ]
    kustomization = {
        "resources": [os.path.relpath(DEPLOY / "examples" / example, folder.resolve())],
        "images": [{"name": "fusecache", "newName": name, "newTag": tag}],
        "patches": [{"target": {"kind": "Job"}, "patch": yaml.safe_dump(operations)}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def from_readme(part: str, pod: str = "") -> list[str]:
    """The arguments of the README's one kubectl command with that in it, comments left out."""
    lines = (DEPLOY.parent / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("kubectl ") and part in line)
    return [argument.replace("POD", pod) for argument in shlex.split(line, comments=True)[1:]]


@pytest.mark.parametrize("example", ["training", "training-restricted"])
def test_example_reads_its_data_set_on_the_node_that_has_it(stories: Stories, tmp_path: Path, example: str) -> None:
    stories.make_warm("imagenet", node.NAME)
    stories.world.kubectl("apply", "-k", ours(example, tmp_path))
    selected = f"{pods(example)}?labelSelector=job-name%3Dtrain"
    (pod,) = stories.wait(lambda: stories.api.get(selected)["items"], "the Job has made its pod")
    name = pod["metadata"]["name"]
    stories.wait_phase(name, "Succeeded", example)

    ended = stories.read(name, example)
    assert ended["spec"]["nodeName"] == node.NAME
    decision = stories.decision(ended)
    assert (decision["state"], decision["node"]) == ("placed", node.NAME)
    read = stories.log(name, example).replace(f"{IN_POD}/imagenet/", "./")
    assert sorted(read.splitlines()) == sorted(sums_of(stories.installation.served / "imagenet").splitlines())
    if example == "training":
        assert "imagenet" in stories.world.kubectl(*from_readme("fusecache locality"))
        assert f"{node.NAME} serves " in stories.world.kubectl(*from_readme("fusecache explain", name))
        assert name in stories.world.kubectl(*from_readme("FusecachePlaced"))
    stories.world.kubectl("delete", "job", "-n", example, "train", "--wait=true")


def test_pod_of_the_node_may_set_the_kernels_read_ahead(stories: Stories) -> None:
    """/sys is read-only in its container, but for this."""
    lines = stories.world.box.run("cat", "/proc/self/mountinfo").stdout.splitlines()
    (device,) = (line.split()[2] for line in lines if line.split()[4] == f"{MOUNTS}/{MOUNT}")
    assert stories.world.box.run("cat", f"/sys/class/bdi/{device}/read_ahead_kb").stdout == "1024\n"


LOOKS = f"""
last=
while :; do
  if names=$(ls -A {IN_POD} 2>/dev/null); then [ -n "$names" ] && now=full || now=EMPTY; else now=refused; fi
  [ "$now" = "$last" ] || echo "$now"
  last=$now
done
"""


def test_pod_with_the_rights_of_the_example_never_sees_an_empty_folder(stories: Stories) -> None:
    """While the node's pod is replaced, nothing is mounted: then the folder refuses."""
    job = yaml.safe_load((DEPLOY / "examples/training/job.yaml").read_text())["spec"]["template"]["spec"]
    witness = training_pod("witness", "imagenet", ["sh", "-c", LOOKS])
    witness["spec"] |= {
        "securityContext": job["securityContext"],
        "nodeSelector": {"kubernetes.io/hostname": node.NAME},
    }
    witness["spec"]["containers"][0]["securityContext"] = job["containers"][0]["securityContext"]
    stories.create(witness)
    stories.wait(lambda: stories.log("witness").split() == ["full"], "the witness sees the data")

    selected = f"{pods(NAMESPACE)}?labelSelector=app.kubernetes.io%2Fname%3Dfusecache-node"
    (before,) = stories.api.get(selected)["items"]
    stories.api.delete(pods(NAMESPACE, before["metadata"]["name"]))
    stories.wait(lambda: "refused" in stories.log("witness"), "the folder refuses the witness")
    stories.wait(lambda: stories.log("witness").split()[-1] == "full", "the witness sees the data again")
    stories.wait(stories.node_is_ready, "the node's pod is ready")
    (after,) = stories.api.get(selected)["items"]
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert set(stories.log("witness").split()) == {"full", "refused"}
    stories.delete("witness")
