"""A folder SOURCE of random bytes, on another file system than the tests' state."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def random_files(sizes: Sequence[int]) -> Iterator[Path]:
    """Files `f<size>`. Block files are then copies, which passthrough needs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for size in sizes:
            (Path(folder) / f"f{size}").write_bytes(os.urandom(size))
        yield Path(folder)
