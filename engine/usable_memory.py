"""The memory that this process may use: the host's, or what a limit of its container or service leaves of it.

Cached files do not count as used: Linux drops them when it needs the room.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from native.control_groups import PROC, groups_of


class UsableMemory(NamedTuple):
    """Bytes that the processes under the same limits may use together, and those that are still free."""

    total: int
    available: int


class _Version(NamedTuple):
    """The names of a group's files, and the lines of `memory.stat` that count cached files."""

    limit: str
    used: str
    cached: tuple[str, ...]


_VERSIONS = {
    1: _Version(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
    2: _Version("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def usable_memory(proc: Path = PROC) -> UsableMemory:
    """Return the host's memory within the limits of the process whose files are in `proc`."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for version, folder in groups_of("memory", proc):
        try:
            limit = int((folder / _VERSIONS[version].limit).read_text())
            left = limit - _in_use(folder, _VERSIONS[version])
        except (OSError, ValueError):  # no limit: the file is missing in the root group, or says "max"
            continue
        total, available = min(total, limit), min(available, max(0, left))
    return UsableMemory(total, available)


def _in_use(folder: Path, version: _Version) -> int:
    counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(counted.get(name, 0)) for name in version.cached)
    return int((folder / version.used).read_text()) - cached
