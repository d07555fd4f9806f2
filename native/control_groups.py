"""The control groups of a process: Linux keeps the limits of containers and services in them.

A process may use what its own group and each of the groups around that one leave. There are two versions, and
a host may have both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")


def groups_of(controller: str, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """Yield the version and the folder of each group that may limit a process, whose files are in `proc`.

    `controller` names the kind of limit, such as "memory". Inner groups precede outer ones.
    """
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        # By single spaces: what is mounted may be empty.
        mounts = [line.split(" ") for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for mount in mounts:
        filesystem, _, options = mount[mount.index("-") + 1 :][:3]
        if filesystem == "cgroup2":
            version, name = 2, ""
        elif filesystem == "cgroup" and controller in options.split(","):
            version, name = 1, controller
        else:
            continue
        path = next((path for _, names, path in own if name in names.split(",")), None)
        if path is not None:
            yield from ((version, folder) for folder in _folders(Path(mount[4]), mount[3], path))


def _folders(top: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the folders of group `path` and of those around it, in the tree of group `root` mounted at `top`.

    A container that sees the host's paths, but only its own tree, has its group at the top.
    """
    group = Path(path)
    inner = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else Path()
    for parent in (inner, *inner.parents):
        yield top / parent
