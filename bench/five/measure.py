"""The measurement of cells: start a server, and search for its highest rate within the SLO."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from bench.cost import cost_per_million
from bench.five.factors import WORKERS, TechniqueSet, name_of, request_fields, serve_options, served
from bench.five.search import NoRateError, highest
from bench.five.workloads import WORKLOADS, Prompts, Traffic
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.statistics import latencies, meets
from bench.servers import ServerProcess, running, tandem_command

SERVED_NAME = "model"
WARMUP_S = 2.0
SLACK_S = 0.5
"""[s] Time added to the latest time at which a request can still be within the SLO."""
FLEET = 4
"""Number of workers of every cell of a simulated fleet."""
SCALE = 4
"""Lengths of the fleet's texts over those of the measured workloads, whose model is small."""
NEAR = 1.1
"""Step of a search that begins at the rate of an earlier repeat."""


class Objective(msgspec.Struct, frozen=True):
    """The objective: a request is good if its first token comes within `ttft_s` and its later tokens take at
    most `tpot_s` each on average. A rate is good if at least the share `attainment` of its requests is good.
    """

    ttft_s: float
    tpot_s: float
    attainment: float


class ExperimentSetting(msgspec.Struct, frozen=True):
    """Settings shared by all cells of an experiment. Cells of different settings are not comparable. If the
    workers are simulated, `model` is their profile.
    """

    model: str
    max_model_len: int
    kv_mib: int
    speculative_config: str
    objective: Objective
    seconds: float
    probes: int
    simulated: bool = False

    @property
    def workers(self) -> int:
        return FLEET if self.simulated else WORKERS

    def traffic(self, workload: str) -> Traffic:
        return WORKLOADS[workload].scaled(SCALE if self.simulated else 1)


class Trial(msgspec.Struct, frozen=True):
    """One load at one rate. `goodput` counts good requests per second; medians are in seconds, 0 without
    answers.
    """

    rate: float
    goodput: float
    attainment: float
    ttft_s: float
    tpot_s: float
    errors: int


class CellOutcome(msgspec.Struct, frozen=True):
    """The outcome of one cell in one repeat.

    `trials` holds all trials of the search; `best` is None if no trial met the objective. `light` is the
    trial at the workload's light rate, the same for all cells. `memory_bytes` is the memory of the server's
    processes after the search, with shared pages counted once; 0 if they are simulated.
    """

    workload: str
    cell: list[str]
    repeat: int
    trials: list[Trial]
    best: Trial | None
    light: Trial
    memory_bytes: int

    @property
    def goodput(self) -> float:
        """Return the best trial's goodput [requests/s]; if none was good, the lowest rate: a bound."""
        return self.best.goodput if self.best is not None else min(trial.rate for trial in self.trials)

    def __str__(self) -> str:
        found = f"{self.best.goodput:.1f} requests/s" if self.best is not None else "no rate"
        latencies = f"TTFT {self.light.ttft_s * 1e3:.1f} ms, TPOT {self.light.tpot_s * 1e3:.2f} ms"
        return f"{found} in {len(self.trials)} probes, {latencies}"

    def cost(self, setting: ExperimentSetting, price: float) -> float:
        """Return the cost of a million output tokens of requests within the SLO."""
        tokens = self.goodput * setting.traffic(self.workload).output
        return cost_per_million(price, setting.workers, tokens)


class Loaded(Protocol):
    """Workers that can be measured under loads of one workload. `trials` holds those of the search."""

    trials: list[Trial]

    def search(self, rate: float) -> tuple[bool, Trial]:
        """Return whether the rate meets the objective, and its trial."""

    def measure(self, rate: float) -> Trial:
        """Measure a whole load, even if it cannot meet the objective."""


def outcome_of(
    workers: Loaded,
    workload: Traffic,
    cell: TechniqueSet,
    repeat: int,
    probes: int,
    near: float | None = None,
    memory: Callable[[], int] = lambda: 0,
) -> CellOutcome:
    """Measure one cell. The search begins at the rate `near`, if it is known."""
    light = workers.measure(workload.light_rate)
    begin, step = (workload.first_rate, 2.0) if near is None else (near, NEAR)
    try:
        _, best = highest(begin, probes, workers.search, step)
    except NoRateError:
        best = None
    return CellOutcome(workload.name, sorted(cell), repeat, workers.trials, best, light, memory())


class _MissedError(Exception):
    """Too many requests were late to meet the objective."""


class MeasuredServer:
    """A running server that gets loads of one workload."""

    def __init__(
        self,
        base_url: str,
        setting: ExperimentSetting,
        workload: Traffic,
        prompts: Prompts,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """`fields` are those of every request, beside its prompt and length."""
        objective = setting.objective
        latest = objective.ttft_s + (workload.output - 1) * objective.tpot_s + SLACK_S
        target = ServerTarget(base_url, SERVED_NAME, ignore_eos=True, extra_body=fields or {})
        self._patient_client = Client(target)
        self._client = Client(replace(target, timeout=latest))
        self._objective, self._seconds, self._prompts = objective, setting.seconds, prompts
        self.trials: list[Trial] = []

    def warm_up(self, rate: float) -> None:
        """Send a short load. Raises RuntimeError if the server answers no request."""
        records = run_on_fast_loop(drive(self._patient_client, self._prompts.load(rate, WARMUP_S)))
        if all(record.error for record in records):
            raise RuntimeError(f"the server does not answer: {records[0].error}: {records[0].detail}")

    def search(self, rate: float) -> tuple[bool, Trial]:
        """Return whether the rate meets the objective, and the trial, which ends as soon as it must fail."""
        load = self._prompts.load(rate, self._seconds)
        spare = (1 - self._objective.attainment) * len(load)
        ended: list[Record] = []

        def on_done(record: Record) -> None:
            ended.append(record)
            if sum(not self._is_good(each) for each in ended) > spare:
                raise _MissedError

        try:
            records = run_on_fast_loop(drive(self._client, load, on_done=on_done))
        except* _MissedError:
            records = ended
        trial = self._judge(records, len(load), rate)
        self.trials.append(trial)
        return trial.attainment >= self._objective.attainment, trial

    def measure(self, rate: float) -> Trial:
        load = self._prompts.load(rate, self._seconds)
        return self._judge(run_on_fast_loop(drive(self._client, load)), len(load), rate)

    def _is_good(self, record: Record) -> bool:
        limits = {"ttft": self._objective.ttft_s, "tpot": self._objective.tpot_s}
        return not record.error and meets(latencies(record), limits)

    def _judge(self, records: Sequence[Record], sent: int, rate: float) -> Trial:
        """Compute the trial's figures. Requests without a record count as not good."""
        answered = [latencies(record) for record in records if not record.error]
        good = sum(map(self._is_good, records))
        return Trial(
            rate=rate,
            goodput=good / sent * rate,
            attainment=good / sent,
            ttft_s=statistics.median(each["ttft"] for each in answered) if answered else 0.0,
            tpot_s=statistics.median(each["tpot"] for each in answered) if answered else 0.0,
            errors=sum(bool(record.error) for record in records),
        )


class CellServers:
    """The server of the cell that is measured. It stays for the next cell if that differs only in what
    requests turn on and off.
    """

    def __init__(self, setting: ExperimentSetting, texts: Sequence[Sequence[int]], logs: Path) -> None:
        self._setting, self._texts, self._logs = setting, texts, logs
        self._running = ExitStack()
        self._process: ServerProcess | None = None
        self._serves: tuple[TechniqueSet, int] | None = None

    def measure(self, workload: Traffic, cell: TechniqueSet, repeat: int, near: float | None) -> CellOutcome:
        """Measure one cell. Raises RuntimeError if its server does not start, does not answer, or ends."""
        prompts = Prompts(self._texts, workload, repeat, f"{workload.name} {sorted(cell)}", "sharing" in cell)
        try:
            process = self._serving(cell, repeat)
            url, fields = process.command.base_url, request_fields(cell)
            server = MeasuredServer(url, self._setting, workload, prompts, fields)
            server.warm_up(workload.first_rate)
            outcome = outcome_of(
                server,
                workload,
                cell,
                repeat,
                self._setting.probes,
                near,
                lambda: resident_bytes(process.pid),
            )
            process.check()
        except RuntimeError:
            self.close()
            raise
        return outcome

    def _serving(self, cell: TechniqueSet, repeat: int) -> ServerProcess:
        """Return the running server for the cell, or start it in place of another one."""
        if self._process is not None and self._serves == (served(cell), repeat):
            return self._process
        self.close()
        setting = self._setting
        command = tandem_command(
            *("--model", setting.model, "--served-model-name", SERVED_NAME),
            *("--max-model-len", str(setting.max_model_len)),
            *("--kv-cache-memory-bytes", str(setting.kv_mib << 20)),
            *serve_options(cell, setting.speculative_config),
        )
        logs = self._logs / f"{name_of(served(cell))}, repeat {repeat}"
        [self._process] = self._running.enter_context(running([command], logs))
        self._serves = served(cell), repeat
        return self._process

    def close(self) -> None:
        """End the server."""
        self._running.close()
        self._process = None


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, with each shared page split among its users
    (proportional set size).
    """
    total, process = 0, psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        try:
            total += each.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
