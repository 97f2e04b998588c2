"""The jars of Alluxio 2.9.3, fetched once with Maven and kept outside the checkout.

`class_path()` answers with the class path and fetches when the folder is not there yet (199 MB, about 40 s).
The folder appears by one rename, so an interrupted fetch is never taken for a whole one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

POM = Path(__file__).with_name("alluxio_pom.xml")
VERSION = "2.9.3"
FETCH_S = 900


def skip_reason() -> str | None:
    """Why real servers can't run here, in words; None when they can."""
    missing = [program for program in ("java", "mvn") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not installed (.ci/prepare java)" if missing else None


def cache_folder() -> Path:
    """XDG_CACHE_HOME/fusecache, or ~/.cache/fusecache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "fusecache"


def class_path() -> str:
    """A Java class path with every jar; fetches them when needed."""
    folder = cache_folder() / f"alluxio-{VERSION}"
    if not folder.is_dir():
        fetch(folder)
    return f"{folder}/*"


def fetch(folder: Path) -> None:
    """Let Maven copy the servers and everything they depend on into `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        jars = Path(scratch) / "jars"
        arguments = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=FETCH_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"Maven could not fetch Alluxio {VERSION}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        try:
            jars.rename(folder)
        except OSError:
            # Another run was faster; its folder is as good.
            if not folder.is_dir():
                raise
