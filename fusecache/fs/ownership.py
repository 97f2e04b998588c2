"""Alluxio's owner and group names as this machine's numbers.

The order: the explicit map of the configuration, this machine's passwd/group database when `map_names` is on, the
configured uid/gid, the daemon's own when it is not root, nobody (65534). Root is never shown by accident: a name
that nothing maps must not make files root's. Answers are remembered for the life of the mount, because a look-up in
passwd may ask a directory server.
"""

from __future__ import annotations

import grp
import os
import pwd

from fusecache.config.settings import Settings

NOBODY = 65534
"""uid/gid of nobody on Linux."""


class Ownership:
    """Maps owner and group names of one mount."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._uids: dict[bytes, int] = {}
        self._gids: dict[bytes, int] = {}
        self._default_uid = settings.uid if settings.uid is not None else (os.geteuid() or NOBODY)
        self._default_gid = settings.gid if settings.gid is not None else (os.getegid() or NOBODY)

    def uid(self, owner: bytes) -> int:
        """uid for an Alluxio owner name."""
        known = self._uids.get(owner)
        if known is None:
            known = self._uids[owner] = self._find_uid(owner.decode("utf-8", "surrogateescape"))
        return known

    def gid(self, group: bytes) -> int:
        """gid for an Alluxio group name."""
        known = self._gids.get(group)
        if known is None:
            known = self._gids[group] = self._find_gid(group.decode("utf-8", "surrogateescape"))
        return known

    def _find_uid(self, name: str) -> int:
        mapped = self._settings.owner_map.get(name)
        if mapped is not None:
            return mapped
        if self._settings.map_names:
            try:
                return pwd.getpwnam(name).pw_uid
            except (KeyError, ValueError):
                pass  # not a user of this machine: the default holds
        return self._default_uid

    def _find_gid(self, name: str) -> int:
        mapped = self._settings.group_map.get(name)
        if mapped is not None:
            return mapped
        if self._settings.map_names:
            try:
                return grp.getgrnam(name).gr_gid
            except (KeyError, ValueError):
                pass  # not a group of this machine: the default holds
        return self._default_gid
