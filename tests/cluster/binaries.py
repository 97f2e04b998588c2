"""The programs of a Kubernetes node, built once from the Go module proxy and kept outside the checkout.

`folder()` answers with a folder that holds all of PROGRAMS and builds it when it is not there yet (about eight minutes
on two cores, with what Go remembers of earlier builds much less). The folder appears by one rename, so an interrupted
build is never taken for a whole one. A Go that is too old for Kubernetes fetches the Go it needs from the module proxy.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.alluxio_jars import cache_folder

VERSION = "1.37.2"
GO_VERSION = "1.26.8"
"""Fetched where the machine's Go is older than what Kubernetes asks for."""

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
GO_MOD = Path(__file__).with_name("kubernetes_go.mod")
"""Kubernetes' staging modules, which its own go.mod replaces by folders that the module proxy does not serve."""

BUILD_S = 3600
TOOLCHAIN = f"golang.org/toolchain@v0.0.1-go{GO_VERSION}.linux-amd64"


def folder() -> Path:
    """Where the programs lie; builds them when needed. RuntimeError with Go's last words when that fails."""
    ready = cache_folder() / f"kubernetes-{VERSION}"
    if _is_whole(ready):
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with ready.with_name(f"{ready.name}.lock").open("w") as lock:
        # Two builds at a time would take each twice as long.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(ready):
            build(ready)
    return ready


def _is_whole(ready: Path) -> bool:
    return all((ready / program).is_file() for program in PROGRAMS)


def build(ready: Path) -> None:
    """Compile PROGRAMS into `ready`."""
    print(f"building Kubernetes {VERSION} into {ready} (once; minutes)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=ready.parent, prefix=f"{ready.name}.") as scratch:
        module = Path(scratch) / "module"
        module.mkdir()
        shutil.copyfile(GO_MOD, module / "go.mod")
        programs = Path(scratch) / "programs"
        programs.mkdir()
        stamps = {"gitVersion": f"v{VERSION}", "gitMajor": VERSION.split(".")[0], "gitMinor": VERSION.split(".")[1]}
        flags = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())
        arguments = ["build", f"-ldflags=-s -w {flags}", "-o", f"{programs}/"]
        arguments += [f"k8s.io/kubernetes/cmd/{program}" for program in PROGRAMS]
        _run([go(), *arguments], module)
        if ready.is_dir():
            shutil.rmtree(ready)  # of an older list of programs
        programs.rename(ready)


def go() -> str:
    """A Go that is new enough: the machine's, or one from the module proxy. RuntimeError when there is none at all."""
    found = shutil.which("go")
    if found is None:
        raise RuntimeError("go is not installed (.ci/prepare cluster)")
    wanted = re.search(r"^go (\d+)\.(\d+)", GO_MOD.read_text(), re.MULTILINE)
    said = subprocess.run([found, "version"], capture_output=True, text=True, check=True).stdout
    has = re.search(r"go(\d+)\.(\d+)", said)
    assert wanted is not None
    if has is not None and tuple(map(int, has.groups())) >= tuple(map(int, wanted.groups())):
        return found
    return _fetch_go(found)


def _fetch_go(old: str) -> str:
    """Let an old Go fetch a newer one as a module; the module's archive holds no executable bits."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "go.mod").write_text("module toolchain\n")
        module = json.loads(_run([old, "mod", "download", "-json", TOOLCHAIN], Path(scratch)))
    root = Path(module["Dir"])
    for program in [*(root / "bin").iterdir(), *(root / "pkg" / "tool").rglob("*")]:
        if program.is_file() and not os.access(program, os.X_OK):
            program.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    return str(root / "bin" / "go")


def _run(command: list[str], module: Path) -> str:
    """Run Go in a module's folder, gently; its standard output."""
    # -mod=mod: go.sum is written here, every line checked against Go's checksum database.
    environment = os.environ | {"GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        ["nice", *command], cwd=module, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr[-6000:]}")
    return done.stdout


if __name__ == "__main__":
    print(folder())
