"""`auto`: no-open or passthrough, by a bounded look at the data set.

Passthrough makes a file's bytes as fast as the local file's but costs an OPEN and a RELEASE each time; no-open costs
nothing for a file that the kernel has in memory. So small files want no-open, large ones passthrough, where the node
has them as files of one block; what has to be fetched is read through a worker in either mode.

The choice is made once per mount, because no-open is a property of the whole connection.

Looks at values only; the agent takes the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusecache.config.units import approximate_size

LARGE_FILE_BYTES = 4 << 20
"""Mean size from which a file's bytes matter more than its opening. A file of 4 MiB takes the page cache about 1 ms to
copy; an OPEN and a RELEASE through the gate 0.1 ms."""

MOST_FILES = 2_000
MOST_FOLDERS = 16
SAMPLE_S = 5.0
"""A sample of so many files out of so many folders; the mount waits for it no longer than this."""


class SampledFile(NamedTuple):
    """One file of the sample."""

    length: int
    """Bytes."""
    one_local_block: bool
    """Its bytes are one block file of this node."""


def choose(sample: Sequence[SampledFile]) -> tuple[str, str]:
    """(open mode, why)."""
    if not sample:
        return "no-open", "no file was found to judge by"
    mean = sum(file.length for file in sample) / len(sample)
    seen = f"the mean of {len(sample):,} files is {approximate_size(mean)}"
    if mean < LARGE_FILE_BYTES:
        return "no-open", f"{seen}: small files"
    local = sum(file.length for file in sample if file.one_local_block)
    part = local / max(1, sum(file.length for file in sample))
    if part < 0.5:
        return "no-open", f"{seen}: large files, but {100 * part:.0f} % of the bytes are in block files of this node"
    return "passthrough", f"{seen}: large files, {100 * part:.0f} % of the bytes in block files of this node"
