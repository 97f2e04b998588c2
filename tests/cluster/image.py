"""fusecache's image, built as deploy/image/build builds it for anybody, and loaded into the real node."""

from __future__ import annotations

import subprocess
from pathlib import Path

NAME = "localhost/fusecache:test"
"""What deploy/overlays/test runs."""

FOLDER = Path(__file__).parents[2] / "deploy" / "image"
BUILD_S = 1200


def root_file_system() -> Path:
    """What all images share, made when it is not there yet (minutes). RuntimeError with why not."""
    return Path(_run(str(FOLDER / "root-file-system")).strip())


def build(archive: Path) -> Path:
    """Build the OCI archive: seconds, after `root_file_system`. RuntimeError with why not."""
    _run(str(FOLDER / "build"), str(archive), NAME)
    return archive


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout
