"""The kernel's read-ahead for a mount: what each size makes of sequential, random and small-file reads.

    python -m perf.micro.read_ahead [flags of perf.bench]

In mode no-open, because a file that is passed through has the read-ahead of its own file system. Larger windows make
fewer and larger requests, up to what one may hold (request_size.py), but also read what nobody asked for.
"""

from __future__ import annotations

import sys

from perf import bench
from perf.systems import with_flags
from perf.tables import of_setting

KIBIBYTES = (128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT = "1024 KiB"
VARIANTS = {
    f"{size} KiB": with_flags("--open-mode", "no-open", "--read-ahead-bytes", f"{size}KiB") for size in KIBIBYTES
}
TABLE = of_setting("read-ahead", "Read-ahead of a mount, mode no-open", VARIANTS, DEFAULT)

if __name__ == "__main__":
    sys.exit(bench.run(sys.argv[1:], TABLE, VARIANTS))
