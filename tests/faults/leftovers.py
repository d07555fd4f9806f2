"""Finds what a transfer left behind: threads, descriptors, mappings, shared memory."""

from __future__ import annotations

import collections
import gc
import os
import time
from pathlib import Path

ORPHANED_S = 10.0
"""Shared memory may have no owner for this long: while it is being made, or when its last process dies."""
AT_REST_S = 0.3


def held() -> dict[str, int]:
    """Count this process's threads, descriptors and mappings."""
    gc.collect()
    counts: collections.Counter[str] = collections.Counter()
    for task in os.listdir("/proc/self/task"):
        try:
            counts["thread " + Path(f"/proc/self/task/{task}/comm").read_text().strip()] += 1
        except OSError:
            continue
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            counts["descriptor " + os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]] += 1
        except OSError:
            continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line or "/dev/shm" in line or "SYSV" in line:
            counts["mapping " + line.split(maxsplit=5)[5]] += 1
    return dict(counts)


def at_rest() -> dict[str, int]:
    """Return the counts once they are steady: an open UCX still connects to itself."""
    now, since = held(), time.monotonic()
    while time.monotonic() < since + AT_REST_S:
        time.sleep(0.01)
        if (then := held()) != now:
            now, since = then, time.monotonic()
    return now


def more_than(before: dict[str, int]) -> dict[str, int]:
    """Return what this process holds now and did not hold before."""
    extra = {what: count - before.get(what, 0) for what, count in held().items()}
    return {what: count for what, count in extra.items() if count > 0}


def shared_segments() -> set[str]:
    """Return the names of shared memory that a transfer might leave behind."""
    files = {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "nixl", "tandem"))}
    table = Path("/proc/sysvipc/shm")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return files | {f"SYSV {row[1]}" for row in rows}


def wait_no_orphans(before: set[str]) -> None:
    """Wait until every new piece of shared memory is mapped by a living process."""
    deadline = time.monotonic() + ORPHANED_S
    while left := _orphaned_segments(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _orphaned_segments(before: set[str]) -> set[str]:
    """Return new shared memory that no living process has mapped."""
    new = shared_segments() - before
    if not new:
        return set()
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        mapped |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
        mapped |= {f"SYSV {line.split()[4]}" for line in lines if "/SYSV" in line}
    return new - mapped
