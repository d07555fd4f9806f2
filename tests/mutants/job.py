"""The job and the answers of a process that judges mutants, as files of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.operators import Mutant

JOB = "TANDEM_MUTANTS"
"""The environment variable that names the job's file."""
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

    @classmethod
    def of(cls, row: dict[str, Any]) -> Module:
        return cls(
            {name: Baseline(**test) for name, test in row["tests"].items()}, row["shared"], row["starts"]
        )

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


@dataclass(frozen=True)
class Job:
    files: list[str]
    mutants: list[Mutant]
    records: Path
    verdicts: Path
    timeout_s: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> Job:
        row = json.loads(path.read_text())
        mutants = [mutant_of(each) for each in row["mutants"]]
        return cls(row["files"], mutants, Path(row["records"]), Path(row["verdicts"]), row["timeout_s"])

    def recorded(self) -> dict[str, Module]:
        return {row["module"]: Module.of(row) for row in read(self.records)}

    def record(self, path: str, module: Module) -> None:
        append(self.records, {"module": path, **asdict(module)})

    def say(self, verdict: Verdict) -> None:
        append(self.verdicts, asdict(verdict))


def mutant_of(row: dict[str, Any]) -> Mutant:
    return Mutant(**{**row, "lines": tuple(row["lines"])})


def read(path: Path) -> list[dict[str, Any]]:
    """Read lines of JSON. A killed run may have cut off the last one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]
