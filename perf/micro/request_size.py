"""The largest READ that the kernel may send, with read-ahead windows that can fill it.

    python -m perf.micro.request_size [flags of perf.bench]

In mode no-open. 1 MiB (256 pages) is what fs.fuse.max_pages_limit allows unless somebody raises it, and what
pyfuse3's buffer holds; so the question that can be asked of a mount is whether less would do. A slot of shared memory
has this size for each worker and request, so less would also be less memory.
"""

from __future__ import annotations

import sys

from perf import bench
from perf.systems import with_flags
from perf.tables import of_setting

KIBIBYTES = (128, 256, 512, 1024)
READ_AHEAD_KIBIBYTES = (1024, 4096)
DEFAULT = "1024 KiB, read-ahead 1024"
VARIANTS = {
    f"{size} KiB, read-ahead {ahead}": with_flags(
        *("--open-mode", "no-open", "--max-read-bytes", f"{size}KiB", "--read-ahead-bytes", f"{ahead}KiB")
    )
    for ahead in READ_AHEAD_KIBIBYTES
    for size in KIBIBYTES
}
TABLE = of_setting("request-size", "Largest READ of a mount, mode no-open", VARIANTS, DEFAULT)

if __name__ == "__main__":
    sys.exit(bench.run(sys.argv[1:], TABLE, VARIANTS))
