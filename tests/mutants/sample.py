"""Draws mutants of files by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.areas import AREAS
from tests.mutants.operators import Mutant, mutants_of

_DEVICE = "import triton"
"""Files with Triton kernels run without a GPU only in Triton's interpreter."""


def files_of(root: Path, patterns: Iterable[str]) -> list[str]:
    """Return the Python files that the patterns match, except kernels."""
    found = {str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)}
    return sorted(file for file in found if file.endswith(".py") and _DEVICE not in (root / file).read_text())


def drawn(root: Path, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, at most one of each line while lines last."""
    pool = [mutant for file in files for mutant in mutants_of(file, (root / file).read_bytes())]
    random.Random(seed).shuffle(pool)
    taken: set[tuple[str, int]] = set()
    first: list[Mutant] = []
    later: list[Mutant] = []
    for mutant in pool:
        (later if (mutant.file, mutant.line) in taken else first).append(mutant)
        taken.add((mutant.file, mutant.line))
    return (first + later)[:count]


def drawn_of_areas(root: Path, names: Sequence[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Draw the same number of mutants of each area. A file of two areas counts in the first."""
    areas = {name: files_of(root, AREAS[name]) for name in names}
    done: set[str] = set()
    found = []
    for number, (name, files) in enumerate(areas.items()):
        share = (count + number) // len(areas)
        found += [(name, each) for each in drawn(root, [f for f in files if f not in done], share, seed)]
        done.update(files)
    return found
