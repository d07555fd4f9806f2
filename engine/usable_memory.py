"""The memory that this process may use: the host's, or what a limit of its container or service leaves of it.

Linux keeps such limits in control groups, of version 2 or 1. A process may use what its group and each of the
groups around that one leave. Cached files do not count as used: Linux drops them when it needs the room.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc/self")


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
    "cgroup2": _Version("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": _Version(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def usable_memory(proc: Path = _PROC) -> UsableMemory:
    """Return the host's memory within the limits of the process whose files are in `proc`."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for folder, version in _groups(proc):
        try:
            limit = int((folder / version.limit).read_text())
            left = limit - _in_use(folder, version)
        except (OSError, ValueError):  # no limit: the file is missing in the root group, or says "max"
            continue
        total, available = min(total, limit), min(available, max(0, left))
    return UsableMemory(total, available)


def _in_use(folder: Path, version: _Version) -> int:
    counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(counted.get(name, 0)) for name in version.cached)
    return int((folder / version.used).read_text()) - cached


def _groups(proc: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the folders of the process's groups that may limit its memory, innermost first."""
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for mount in mounts:
        kind, _, options = mount[mount.index("-") + 1 :][:3]
        if kind not in _VERSIONS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        controller = "memory" if kind == "cgroup" else ""
        path = next((path for _, names, path in own if controller in names.split(",")), None)
        if path is not None:
            yield from ((folder, _VERSIONS[kind]) for folder in _folders(Path(mount[4]), mount[3], path))


def _folders(top: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the folders of group `path` and of those around it, in the tree of group `root` mounted at `top`.

    A container that sees the host's paths, but only its own tree, has its group at the top.
    """
    group = Path(path)
    inner = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else Path()
    for parent in (inner, *inner.parents):
        yield top / parent
