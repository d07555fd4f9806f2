"""Finds the files that have changed since the branch left main, and what the choice of tests depends on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers.canaries import CANARIES
from tests.tiers.choice import Situation
from tests.tiers.reach import Imports

MAIN = ("origin/HEAD", "origin/main", "main")
"""Names of main. The first that exists counts."""


@dataclass(frozen=True)
class Changes:
    since: str
    """Describes what the working tree was compared with."""
    files: frozenset[str] = field(default_factory=frozenset)
    number: int = 0
    """A number that grows by one with each commit."""


def find_changes(root: Path, base: str = "") -> Changes:
    """Compare the working tree with `base`, or else with the commit at which it left main.

    On main itself, as in a fresh clone, that is the last pushed commit's parent: the diff is the last commit.
    """
    git = _Git(root)
    if not git.says("rev-parse", "HEAD"):
        return Changes("nothing: no Git repository")
    found = base or git.base()
    number = git.number()
    if not found:
        return Changes("nothing: HEAD has no parent here", number=number)
    commit = git.says("rev-parse", "--short", f"{found}^{{commit}}")
    if not commit:
        raise ValueError(f"{base} is no commit of this repository")
    changed = git.says("diff", "--name-only", "--no-renames", commit, "--").splitlines()
    untracked = git.says("ls-files", "--others", "--exclude-standard").splitlines()
    return Changes(commit, frozenset([*changed, *untracked]), number)


@dataclass(frozen=True)
class _Git:
    root: Path

    def says(self, *arguments: str) -> str:
        """Return the output of Git, or nothing if it fails or is not installed."""
        command = ["git", "-c", "core.quotePath=false", *arguments]
        try:
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def base(self) -> str:
        head = self.says("rev-parse", "HEAD")
        for branch in MAIN:
            common = self.says("merge-base", "HEAD", branch)
            if common and common != head:
                return common
        return self.says("rev-parse", "--verify", "--quiet", "HEAD~1")

    def number(self) -> int:
        """Return the number of commits up to HEAD. A shallow clone, which does not know all, derives one from
        its hash.
        """
        if self.says("rev-parse", "--is-shallow-repository") == "true":
            return int(self.says("rev-parse", "HEAD"), 16)
        return int(self.says("rev-list", "--count", "HEAD"))


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
