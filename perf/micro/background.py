"""How many read-ahead requests the kernel may have in flight, and from which number on it holds more back.

    python -m perf.micro.background [flags of perf.bench]

In mode no-open. 12 and 9 are the kernel's own defaults (FUSE_DEFAULT_MAX_BACKGROUND and
FUSE_DEFAULT_CONGESTION_THRESHOLD of fs/fuse/inode.c).
"""

from __future__ import annotations

import sys

from perf import bench
from perf.systems import with_flags
from perf.tables import of_setting

PAIRS = ((12, 9), (32, 24), (64, 48), (128, 96), (256, 192))
DEFAULT = "64/48"
VARIANTS = {
    f"{most}/{threshold}": with_flags(
        *("--open-mode", "no-open", "--max-background", str(most), "--congestion-threshold", str(threshold))
    )
    for most, threshold in PAIRS
}
TABLE = of_setting("background", "max_background/congestion_threshold of a mount, mode no-open", VARIANTS, DEFAULT)

if __name__ == "__main__":
    sys.exit(bench.run(sys.argv[1:], TABLE, VARIANTS))
