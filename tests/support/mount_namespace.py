"""A mount namespace of one's own for a test's child process, without a share in anybody else's mounts.

A new namespace begins with copies of all mounts, those of tests that run at the same time among them. The kernel keeps
a FUSE session until the last copy of its mount is gone, so such a copy would keep another test's daemon from ending:
they are dropped first, but for the one that is asked for.
"""

from __future__ import annotations

from pathlib import Path

_DROP_OTHERS = r"""
keep=$1; shift
awk '{ for (i = 7; i < NF; i++) if ($i == "-") { if ($(i + 1) ~ /^fuse/) print $5; break } }' /proc/self/mountinfo |
while IFS= read -r point; do
  [ "$point" = "$keep" ] || umount --lazy "$point" || true
done
exec "$@"
"""


def own_mount_namespace(*, keep: Path | None = None) -> tuple[str, ...]:
    """The beginning of a command that runs the rest of it there (root only); `keep`: a FUSE mount it gets a copy of."""
    kept = str(keep) if keep is not None else ""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", _DROP_OTHERS, "sh", kept)
