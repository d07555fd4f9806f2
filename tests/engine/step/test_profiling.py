"""The times of steps and the memory of the largest one, measured at the start."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from costs.steps import StepWork
from engine import assembly
from engine.assembly import Assembly
from engine.batch.runner import Fill, ForwardOutput, Step
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.sampler import Sampler
from engine.step import profiling
from engine.step.profiling import activation_bytes, measure_steps
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig

GIB = 1 << 30


class Memory:
    """A GPU's memory. A forward takes 100 bytes for each token, ten times as many with an adapter, and 10 for
    each row of logits, and the choice of a token 200 more. The first forward's memory stays allocated.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = 1000
        self.emptied = 0

    def forward(self, tokens: int, rows: int) -> None:
        if self.allocated == 1000:
            self.allocated += 7
        self.peak = max(self.peak, self.allocated + 100 * tokens + 10 * rows)

    def choose(self, rows: int) -> None:
        self.peak = max(self.peak, self.allocated + 210 * rows)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.emptied += 1


class Runner:
    choice = products = ""
    any_threads = deterministic = can_fill = False

    def __init__(self, pool: KVPool, memory: Memory) -> None:
        self._num_blocks, self._memory = pool.num_blocks, memory

    def warm_up(self) -> float:
        raise AssertionError("this is only a trial")

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        (rows,) = step.batch
        (table,) = rows.tables
        assert len(table) == self._num_blocks == len(set(table))
        self._memory.forward(len(rows.token_ids) * (10 if rows.adapter else 1), len(step.logit_rows))
        return ForwardOutput(torch.empty(len(step.logit_rows), 4), None)


def test_it_is_the_largest_forwards_memory_and_lasting_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))
    layout = PoolLayout((Group.uniform(TARGET, Segment(1, 1, 8, torch.float32)),), 16)
    for tokens, rows, adapter, expected in (
        (40, 8, 0, 4080),
        (8, 8, 0, 1680),
        (2, 1, 0, 210),
        (2, 1, 7, 2010),
    ):
        runner: Any = partial(Runner, memory=memory)
        taken = activation_bytes(
            runner,
            layout,
            torch.device("cpu"),
            tokens,
            rows,
            lambda logits: memory.choose(len(logits)),
            adapter,
        )
        assert taken == expected
    assert memory.emptied == 4


CHAINS = SpeculativeConfig(method="ngram")
HEAD = SpeculativeConfig(method="eagle", model="a head", verification="standard")


@pytest.mark.parametrize(
    ("options", "drafted", "adapters", "rows", "gib"),
    [
        ({}, None, None, 128, 2),
        ({"enforce_eager": True}, None, "some", 128, 1),
        ({"speculative_config": CHAINS}, 8, None, 128 * 9, 2),
        ({"speculative_config": CHAINS, "max_num_batched_tokens": 256}, 8, "some", 256, 2),
        ({"speculative_config": HEAD}, 3, None, 128 * 4, 4),
    ],
    ids=["decode rows", "without graphs", "drafts", "as many as fit a step", "graphs of two models"],
)
def test_free_memory_is_for_all_rows_and_for_graphs(
    options: dict[str, Any],
    drafted: int | None,
    adapters: str | None,
    rows: int,
    gib: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each model's graphs take up to half of the memory that is free when they are captured. With adapters
    the measured step has one.
    """
    made = assembly_of(options, "cuda", drafted, adapters)
    asked: list[tuple[int, bool]] = []

    def measure(
        make: Any, layout: Any, device: Any, tokens: int, rows: int, choose: Any, adapter: int
    ) -> int:
        asked.append((rows, adapter != 0))
        return GIB

    monkeypatch.setattr(assembly, "activation_bytes", measure)
    monkeypatch.setattr(Assembly, "layout", None)
    caplog.set_level(logging.INFO, "tandem.engine")
    assert made._kept_free() == gib * GIB
    assert asked == [(rows, adapters is not None)]
    step = f"1024 for a step of {made.token_budget} tokens, {rows} of them with logits"
    assert f"{gib << 10} MiB stay free next to the KV pool: {step}" in caplog.messages[0]
    assert f"up to {(gib - 1) << 10} for CUDA graphs" in caplog.messages[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [(CHAINS, ["logprobs"]), (HEAD, ["logprobs", "probabilities"])],
    ids=["drafts of the model's own tokens", "drafts by chance"],
)
def test_a_trial_samples_and_verifies(
    options: SpeculativeConfig, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("logprobs", "probabilities"):
        monkeypatch.setattr(Sampler, name, lambda *_, name=name: called.append(name) or {})
    assembly_of({"speculative_config": options}, "cpu", 3)._sample_trial(torch.zeros(4, 32))
    assert called == expected


def assembly_of(
    options: dict[str, Any], device: str, drafted: int | None, adapters: str | None = None
) -> Assembly:
    where = torch.device(device)
    loaded: Any = SimpleNamespace(device=where, vocab_size=32, eos_token_ids=[], adapters=adapters)
    speculator: Any = SimpleNamespace(most_drafted=drafted or 0)
    return Assembly(ServeConfig(**options), loaded, speculator, None)


DISTURBED_S = 0.1
QUICK_S, SLOW_S = 0.001, 0.2


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> None:
    """Turn quick starts off: this module tests repeated runs."""


class Machine:
    """A clock, and steps that take `step_s`, or ten times that in the first tenth of a second."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self.runs = 0
        self._step_s = step_s

    def sequences(self, count: int, num_tokens: int, room: int) -> list[Any]:
        return [
            SimpleNamespace(num_computed=0, request_id=str(index), sampling_row=lambda: None)
            for index in range(count)
        ]

    def forward(self, sequences: list[Any], *, wants_hidden: bool) -> SimpleNamespace:
        self.runs += 1
        self.now += self._step_s * (10 if self.now < DISTURBED_S else 1)
        return SimpleNamespace(logits=None)

    def sample(self, logits: object, rows: object) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def measured(machine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepWork, float]]:
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    return measure_steps(machine, machine, max_sequences=8, max_chunk=512)


def test_a_temporary_disturbance_affects_no_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine(QUICK_S), monkeypatch)
    assert len({work for work, _ in found}) == len(found) == 6
    assert [seconds for _, seconds in found] == pytest.approx([QUICK_S] * 6)


def test_slow_steps_are_run_once_after_a_cold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(SLOW_S)
    assert [seconds for _, seconds in measured(machine, monkeypatch)] == pytest.approx([SLOW_S] * 6)
    assert machine.runs == 7
