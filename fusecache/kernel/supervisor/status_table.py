"""What the supervisor tells the agent, and `status` shows: the mount, its tuning, kernel features, and every part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from fusecache.kernel.privileges import rights_of
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.session import MountSession


def describe(
    spec: MountSpec,
    session: MountSession | None,
    parts: Iterable[Part],
    uptime_s: float,
) -> dict[str, Any]:
    """One JSON object; sizes in bytes. `read_ahead_bytes` is null where it could not be set, and the error says why."""
    uptime_s = round(uptime_s, 1)
    read_ahead_error = session.read_ahead_error if session else None
    rights = rights_of(os.getpid())
    own = {
        "pid": os.getpid(),
        "ready": True,
        "restarts": 0,
        "uptime_s": uptime_s,
        "crash_looping": False,
        "rights": rights.describe() if rights is not None else None,
    }
    return {
        "mountpoint": spec.mountpoint,
        "device": session.device_number if session else "",
        "open_mode": session.open_mode if session else "",
        "why": session.mode_reason if session else "",
        "masked_features": list(spec.masked_features),
        "features": spec.features.describe(),
        "read_ahead_bytes": None if read_ahead_error else spec.read_ahead_bytes,
        "read_ahead_error": read_ahead_error,
        "max_background": session.plan.max_background if session else 0,
        "congestion_threshold": session.plan.congestion_threshold if session else 0,
        "max_pages": session.plan.max_pages if session else 0,
        "max_read_bytes": spec.max_read_bytes,
        "spin_us": spec.spin_us,
        "uptime_s": uptime_s,
        "parts": [{"name": "supervisor", **own}, *(part.describe() for part in parts)],
    }
