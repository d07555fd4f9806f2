"""Finds out what the fast tier's choice depends on in this checkout."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from tests.tiers.canaries import CANARIES
from tests.tiers.changes import Changes
from tests.tiers.choice import Situation
from tests.tiers.reach import Imports

KERNEL_TESTS = ("tests/docs/test_gpu_table.py", "tests/engine/devices/test_interpreted_kernels.py")
"""Modules that interpret and compile Triton kernels for minutes. They run whole when a kernel changed."""
_COMMON = ("deploy/install.sh", "tests/conftest.py", "tests/forked.py", "tests/schedule.py")
_INTERPRETED = "tests/engine/interpreted/"
_IMPORTS_TRITON = re.compile(r"^(?:import|from) triton\b", re.MULTILINE)


def situation_of(root: Path, changes: Changes) -> Situation:
    distances = Imports(root).distances(changes.files) if changes.files else {}
    whole = KERNEL_TESTS if kernel_changed(root, changes.files) else ()
    everything = not changes.files or any(_reaches_all(file) for file in changes.files)
    return Situation(list(CANARIES.values()), distances, whole, changes.number, everything)


def _reaches_all(file: str) -> bool:
    """Tell whether a file may change any test's result, such as pyproject.toml."""
    return file in _COMMON or ("/" not in file and not file.endswith(".md"))


def kernel_changed(root: Path, files: Collection[str]) -> bool:
    """Tell whether one of these files contains kernels, or tests of interpreted kernels."""
    sources = [root / file for file in files if file.endswith(".py") and not file.startswith("tests/")]
    return any(file.startswith(_INTERPRETED) for file in files) or any(
        source.exists() and _IMPORTS_TRITON.search(source.read_text()) for source in sources
    )
