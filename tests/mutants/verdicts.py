"""The results of tests without a mutant, and the verdicts about mutants, as processes send them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.mutants.operators import Mutant

Lines = dict[str, list[int]]


@dataclass
class Baseline:
    """A test's results without mutants."""

    seconds: float = 0.0
    passed: bool = False
    starts: bool = False
    """Whether it starts processes: these do not see a mutant that exists in memory alone."""
    lines: Lines = field(default_factory=dict)


@dataclass
class Module:
    """A module's test results without mutants."""

    tests: dict[str, Baseline] = field(default_factory=dict)
    shared: Lines = field(default_factory=dict)
    """The lines that shared fixtures run."""
    starts: bool = False
    """Whether shared fixtures start processes."""

    def passing(self) -> list[str]:
        return [name for name, test in self.tests.items() if test.passed]

    def starting(self) -> list[str]:
        """Return the tests that use other processes."""
        return [name for name in self.passing() if self.starts or self.tests[name].starts]

    def reaching(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's lines."""
        if hits(self.shared, mutant):
            return self.passing()
        return [name for name in self.passing() if hits(self.tests[name].lines, mutant)]


def hits(lines: Lines, mutant: Mutant) -> bool:
    first, last = mutant.lines
    return any(first <= line <= last for line in lines.get(mutant.file, ()))


@dataclass(frozen=True)
class Verdict:
    """The outcome for a mutant in one process."""

    key: str
    killed_by: str = ""
    ran: int = 0
    seconds: float = 0.0
    in_place: bool = True
    """False if only a process that imports the changed file can judge it."""

    def __str__(self) -> str:
        told = f"killed by {self.killed_by}" if self.killed_by else f"SURVIVES {self.ran} tests"
        return f"{told} ({self.seconds:.1f} s)"
