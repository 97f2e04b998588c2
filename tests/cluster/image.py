"""fusecache's image, built as deploy/image/build builds it for anybody, and loaded into the real node."""

from __future__ import annotations

import subprocess
from pathlib import Path

NAME = "localhost/fusecache:test"
"""What deploy/overlays/test runs."""

BUILD = Path(__file__).parents[2] / "deploy" / "image" / "build"
BUILD_S = 1200


def build(archive: Path) -> Path:
    """Build the OCI archive; seconds, and some minutes after a change of requirements.lock. RuntimeError with why
    not."""
    command = [str(BUILD), str(archive), NAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return archive
