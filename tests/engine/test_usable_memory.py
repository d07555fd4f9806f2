"""The limits of control groups bound the memory that an engine counts on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from engine.usable_memory import usable_memory

ROOT = Path(__file__).parents[2]
GIB = 1024**3


class Tree(NamedTuple):
    """A process's groups and their `limits`. Of each group 3 GiB are in use, and 1 of these is cached."""

    mount: str
    paths: str
    limits: dict[str, object]

    def write(self, folder: Path) -> Path:
        """Write the groups' and the process's files. Return the process's folder."""
        top, proc, is_new = folder / "groups", folder / "proc", "cgroup2" in self.mount
        for path, limit in self.limits.items():
            (group := top / path).mkdir(parents=True, exist_ok=True)
            (group / ("memory.max" if is_new else "memory.limit_in_bytes")).write_text(f"{limit}\n")
            (group / ("memory.current" if is_new else "memory.usage_in_bytes")).write_text(f"{3 * GIB}\n")
            prefix = "" if is_new else "total_"
            cached = f"{prefix}inactive_file {GIB // 4}\n{prefix}active_file {GIB * 3 // 4}\n"
            (group / "memory.stat").write_text(f"mapped_file 7\n{cached}")
        proc.mkdir()
        (proc / "cgroup").write_text(self.paths)
        (proc / "mountinfo").write_text(
            "23 1 0:21 / /proc rw - proc proc rw\n"
            "24 1 0:22 / /mnt rw - tmpfs  rw\n"  # mounted with an empty source
            f"{self.mount.format(top=top)}\n"
        )
        return proc


NEW = "31 23 0:27 {root} {{top}} rw shared:9 - cgroup2 cgroup2 rw"
OLD = "35 31 0:32 {root} {{top}} rw - cgroup cgroup rw,memory"
CASES = {
    "no limit": (Tree(NEW.format(root="/"), "0::/a/b\n", {"a": "max", "a/b": "max"}), 64, 48),
    "its own": (Tree(NEW.format(root="/"), "0::/a/b\n", {"a": "max", "a/b": 8 * GIB}), 8, 6),
    "one around": (Tree(NEW.format(root="/"), "0::/a/b\n", {"a": 5 * GIB, "a/b": 8 * GIB}), 5, 3),
    "a container's": (Tree(NEW.format(root="/"), "0::/\n", {"": 4 * GIB}), 4, 2),
    "overdrawn": (Tree(NEW.format(root="/"), "0::/\n", {"": GIB}), 1, 0),
    "version 1": (Tree(OLD.format(root="/"), "4:cpu:/x\n3:memory:/a\n0::/y\n", {"a": 8 * GIB, "x": 1}), 8, 6),
    "version 1, none": (Tree(OLD.format(root="/"), "3:memory:/a\n", {"a": 2**63 - 4096}), 64, 48),
    "host's path": (Tree(OLD.format(root="/docker/1"), "3:memory:/docker/1\n", {"": 4 * GIB}), 4, 2),
    "outer path": (Tree(NEW.format(root="/"), "0::/../../b\n", {"": 4 * GIB}), 4, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_narrowest_limit_holds(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    tree, total, available = CASES[case]
    assert usable_memory(tree.write(tmp_path)) == (total * GIB, available * GIB)


def test_without_control_groups_the_host_counts(tmp_path: Path) -> None:
    assert usable_memory(tmp_path).total == psutil.virtual_memory().total


LIMITED = """
import sys
from pathlib import Path
from engine.limits import cpu_pool_budget
from protocol.config import ServeConfig
Path(sys.argv[1], "cgroup.procs").write_text("0")
print(*cpu_pool_budget(ServeConfig(model="m"), 10**6, 10**12))
"""


def test_a_pool_fits_into_its_container(tmp_path: Path) -> None:
    """A process in a group with a limit sizes its pool by it."""
    path = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), ""
    )
    group = Path(f"/sys/fs/cgroup/memory{path.rpartition(':')[2]}", f"tandem-{tmp_path.name}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this host lets no process make control groups of version 1")
    try:
        (group / "memory.limit_in_bytes").write_text(str(2 * GIB))
        command = [sys.executable, "-c", LIMITED, str(group)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    budget, _, why = done.stdout.partition(" ")
    assert 0.7 * GIB < int(budget) < 0.9 * GIB
    assert "of the free memory" in why
