"""What each process of a mount must not import: the table of processes is a promise about rights and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("fusecache.daemon.agent", ("pyfuse3", "kubernetes")),
        ("fusecache.daemon.worker", ("kubernetes",)),
        ("fusecache.daemon.gated", ("pyfuse3", "grpc", "kubernetes")),
    ],
)
def test_process_does_not_import(module: str, forbidden: tuple[str, ...]) -> None:
    """Asked of a fresh interpreter: this one has everything loaded."""
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fusecache" in loaded
    assert not loaded & set(forbidden)
