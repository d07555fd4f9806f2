"""The run of all cells in a random order. Finished cells are kept, so that an experiment can resume."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from bench.five.factors import TechniqueSet, cells_of, name_of, served
from bench.five.measure import CellOutcome, ExperimentSetting
from bench.report import write_results


class PlannedRun(msgspec.Struct, frozen=True):
    """One planned measurement."""

    workload: str
    cell: TechniqueSet
    repeat: int

    @property
    def title(self) -> str:
        return f"{self.workload}, {name_of(self.cell)}, repeat {self.repeat}"


def runs_of(workloads: Sequence[str], factors: Sequence[str], repeats: int, seed: int) -> list[PlannedRun]:
    """Return the runs repeat by repeat, shuffled within each repeat. Runs of one server follow each other."""
    rng, ordered = random.Random(seed), []
    for repeat in range(repeats):
        runs = [PlannedRun(workload, cell, repeat) for workload in workloads for cell in cells_of(factors)]
        rng.shuffle(runs)
        servers = [served(run.cell) for run in runs]
        ordered += sorted(runs, key=lambda run: servers.index(served(run.cell)))
    return ordered


class Experiment:
    """The outcomes of the finished cells, kept in `results.json` of a folder."""

    def __init__(self, folder: Path, setting: ExperimentSetting) -> None:
        """Open the folder. Raises ValueError if it has other content, or cells of another setting."""
        self._folder, self._setting = folder, setting
        self.outcomes: list[CellOutcome] = []
        path = folder / "results.json"
        if not path.exists():
            return
        try:
            document = json.loads(path.read_bytes())
            self.outcomes = msgspec.convert(document["outcomes"], list[CellOutcome])
            known = msgspec.convert(document["setting"], ExperimentSetting)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"--output: {path} holds no experiment: {error}") from error
        for field in ExperimentSetting.__struct_fields__:
            old, new = getattr(known, field), getattr(setting, field)
            if old != new:
                raise ValueError(
                    f"--output: {path} was measured with {field} {old}, now it is {new}: "
                    "choose another folder, or delete it"
                )

    def missing(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        done = {(each.workload, frozenset(each.cell), each.repeat) for each in self.outcomes}
        return [run for run in runs if (run.workload, run.cell, run.repeat) not in done]

    def near(self, run: PlannedRun) -> float | None:
        """Return the rate that the cell reached in an earlier repeat; None if it has reached none."""
        found = [
            each.best
            for each in self.outcomes
            if (each.workload, frozenset(each.cell)) == (run.workload, run.cell)
        ]
        return next((best.rate for best in found if best is not None), None)

    def complete(self, workload: str, factors: Sequence[str]) -> list[CellOutcome]:
        """Return the outcomes of the design's cells in all repeats before the first incomplete repeat."""
        cells = set(cells_of(factors))
        mine = [each for each in self.outcomes if each.workload == workload and frozenset(each.cell) in cells]
        counts = Counter(each.repeat for each in mine)
        whole = next(repeat for repeat in count() if counts[repeat] < len(cells))
        return [each for each in mine if each.repeat < whole]

    def measure(
        self, runs: Sequence[PlannedRun], one: Callable[[PlannedRun], CellOutcome]
    ) -> Iterator[tuple[PlannedRun, CellOutcome | RuntimeError]]:
        """Measure the missing runs. Write each outcome to the folder at once; yield errors without keeping
        them.
        """
        for run in self.missing(runs):
            try:
                outcome = one(run)
            except RuntimeError as error:
                yield run, error
                continue
            self.outcomes.append(outcome)
            write_results(self._folder, self.content())
            yield run, outcome

    def content(self) -> dict[str, Any]:
        return {
            "setting": msgspec.to_builtins(self._setting),
            "outcomes": msgspec.to_builtins(self.outcomes),
            "load_average": os.getloadavg(),
        }
