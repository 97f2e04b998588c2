"""The name of the user whose process this is, for those who have to call themselves something."""

from __future__ import annotations

import getpass
import os


def own_user() -> str:
    """From LOGNAME and its like, or the passwd database; the number where neither knows."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # No entry in passwd for this uid, as in many containers.
        return str(os.getuid())
