"""Modules that start Ray run one after the other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.schedule import STARTS_RAY

ROOT = Path(__file__).parents[1]
STARTS = re.compile(r'\b(ServerProcess\(|local_ray\.start\(|running_ray\(|measure\("object_store")')


def test_each_module_that_starts_ray_is_listed() -> None:
    modules = (ROOT / "tests").rglob("test_*.py")
    found = [str(module.relative_to(ROOT)) for module in modules if STARTS.search(module.read_text())]
    assert sorted(found) == sorted(STARTS_RAY)
