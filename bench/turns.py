"""Turns of systems, round by round. Ratios are taken within rounds, since changes of the machine's speed
affect all systems alike.

Either a system starts in its turn, is measured, and stops before the next one starts, since an idle server
that polls would take cores from the server under measurement; or all run side by side, which none that polls
may, and take short turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bench.peers.systems import SYSTEMS, System, SystemSettings, parse_system
from bench.report import RESULTS, show
from bench.servers import running

T = TypeVar("T")

SystemOption = Annotated[list[str], typer.Option(help=f"[label=]name [flags] or URL; {', '.join(SYSTEMS)}")]
ModelOption = Annotated[Path, typer.Option(exists=True, help="local model folder or GGUF file")]
EnvDirOption = Annotated[Path, typer.Option(help="the peers' environments")]
RoundsOption = Annotated[int, typer.Option(min=1, help="in which the systems take turns")]


def in_round(systems: Sequence[T], number: int) -> Sequence[T]:
    """Return the systems of a round, in reverse order in every second round, so that a drift cancels out."""
    return systems if number % 2 == 0 else systems[::-1]


def take_turns(
    specs: Sequence[str],
    setting: SystemSettings,
    rounds: int,
    measure: Callable[[System, int], Iterator[T]],
    start_timeout: float = 600.0,
) -> list[T]:
    """Measure all systems, round by round. A system that fails is reported and left out of its round. Keep
    the servers' logs. Exit if nothing could be measured.
    """
    logs = _new_log_folder()
    measurements: list[T] = []
    for number in range(rounds):
        for spec in in_round(specs, number):
            system = parse_system(spec, setting)
            folder = logs / f"round-{number}" / file_name(system.label)
            try:
                with running(system.commands, folder, start_timeout):
                    for measurement in measure(system, number):
                        show(f"round {number}, {measurement}")
                        measurements.append(measurement)
            except RuntimeError as error:
                show(f"round {number}, {system.label} failed: {error}")
    if not measurements:
        raise typer.Exit(1)
    return measurements


def start_all(
    specs: Sequence[str], setting: SystemSettings, stack: ExitStack, start_timeout: float = 600.0
) -> list[System]:
    """Start all systems, which run side by side until `stack` closes. None may poll while it idles."""
    systems, logs = [parse_system(spec, setting) for spec in specs], _new_log_folder()
    for system in systems:
        stack.enter_context(running(system.commands, logs / file_name(system.label), start_timeout))
    return systems


def _new_log_folder() -> Path:
    return RESULTS / "logs" / time.strftime("%Y%m%d-%H%M%S")


def file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in label)


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio_to(base: Mapping[int, T], ours: Mapping[int, T], value: Callable[[T], float]) -> float | None:
    """Return the median ratio of a value over the rounds that both have. Both map rounds to measurements."""
    shared = [(value(ours[number]), value(base[number])) for number in ours if number in base]
    return known_median(mine / its for mine, its in shared if its > 0)


def as_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
