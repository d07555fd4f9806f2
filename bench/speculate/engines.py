"""Engines in this process: one without speculation, and one for each number of drafted tokens.

They take turns of a fraction of a second, so that changes of the machine's speed affect all of them alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from bench.speculate.measurement import CaseMeasurement, TimedAnswer, summarize
from bench.speculate.plan import Case, Drafting, NumTokens
from bench.speculate.workload import WorkloadPrompt
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from speculation.speculator import BatchSpeculator

_TURN_SECONDS = 0.1
_DRAFT_SECONDS = "spec_decode_draft_seconds_total"


class Engines:
    """The engines. `config` is the configuration of the engine without speculation.

    In addition to it, only the engines of the current way to speculate are kept, one for each number of
    drafted tokens.
    """

    def __init__(self, config: ServeConfig, draftings: Sequence[Drafting], output_len: int) -> None:
        self._config = config
        self._draftings = {drafting.label: drafting.config for drafting in draftings}
        self._output_len = output_len
        self._plain = Engine(config, speculate=BatchSpeculator)
        self._drafting: dict[tuple[str, NumTokens], Engine] = {}
        self._runs = 0

    @property
    def max_prompt_len(self) -> int:
        return self._plain.max_model_len - self._output_len

    def run(
        self, cases: Sequence[Case], number: int, prompts: Sequence[WorkloadPrompt]
    ) -> list[CaseMeasurement]:
        """Run the cases in turns. Raises RuntimeError if a request fails."""
        runs = []
        for case in cases:
            self._runs += 1
            requests = requests_of(case, prompts, self._runs, self._output_len)
            runs.append(EngineRun(self._engine(case), requests, case))
        gc.collect()
        gc.freeze()  # as a worker does once it is ready
        running = runs
        while running:
            running = [run for run in running if run.take_turn(_TURN_SECONDS)][::-1]
        return [run.measurement(number) for run in runs]

    def close(self) -> None:
        for engine in (self._plain, *self._drafting.values()):
            engine.close()

    def _engine(self, case: Case) -> Engine:
        if case.num_tokens is None:
            return self._plain
        label = case.block.drafting
        for other in [key for key in self._drafting if key[0] != label]:
            self._drafting.pop(other).close()
        key = label, case.num_tokens
        if key not in self._drafting:
            config = replace(self._config, speculative_config=self._draftings[label])
            self._drafting[key] = Engine(config, speculate=BatchSpeculator)
        return self._drafting[key]


def requests_of(
    case: Case, prompts: Sequence[WorkloadPrompt], run: int, output_len: int
) -> list[EngineRequest]:
    """Return the requests of a case. Each run, and in it each further copy of the prompts, has a different
    cache salt, so that none uses the cache of another, nor drafts from its answers.
    """
    fixed = case.num_tokens if isinstance(case.num_tokens, int) else None
    return [
        EngineRequest(
            request_id=f"{run}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(
                max_tokens=output_len,
                temperature=case.block.temperature,
                seed=index,
                ignore_eos=not prompt.ends,
                grammar=prompt.grammar,
            ),
            cache_salt=f"{run}-{prompt.copy}",
            speculation=RequestSpeculation(num_speculative_tokens=fixed),
        )
        for index, prompt in enumerate(prompts)
    ]


class EngineRun:
    """A run that keeps as many requests running as the case says, on a clock that stops during other runs'
    turns.
    """

    def __init__(self, engine: Engine, requests: Sequence[EngineRequest], case: Case) -> None:
        self._engine, self._case = engine, case
        self._waiting = list(reversed(requests))
        self._concurrency = case.block.concurrency
        self._running: dict[str, TimedAnswer] = {}
        self._answers: list[TimedAnswer] = []
        self._now = 0.0
        self._full_steps: list[float] = []
        """Seconds of each step in which `concurrency` requests decoded and nothing else ran."""
        self._drafted_before = _draft_seconds(engine)

    def take_turn(self, seconds: float) -> bool:
        """Step for `seconds`. Return whether there is more to do. Raises RuntimeError if a request fails."""
        end = self._now + seconds
        while self._now < end and (self._waiting or self._running):
            self._step()
        return bool(self._waiting or self._running)

    def _step(self) -> None:
        started = time.perf_counter()
        while self._waiting and len(self._running) < self._concurrency:
            request = self._waiting.pop()
            answer = self._running[request.request_id] = TimedAnswer(self._now)
            self._answers.append(answer)
            self._engine.add(request)
        outputs = self._engine.step().outputs
        seconds = time.perf_counter() - started
        self._now += seconds
        is_full = len(outputs) == self._concurrency
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            answer = self._running[output.request_id]
            if not answer.token_ids:
                answer.first, is_full = self._now, False
            answer.last = self._now
            answer.token_ids += output.token_ids
            answer.steps += 1
            if output.drafted_tokens:
                answer.drafted += output.drafted_tokens
                answer.lengths[output.accepted_tokens] += 1
            if output.finish_reason is not None:
                del self._running[output.request_id]
        if is_full:
            self._full_steps.append(seconds)

    def measurement(self, number: int) -> CaseMeasurement:
        draft_s = _draft_seconds(self._engine) - self._drafted_before
        step_s = statistics.fmean(self._full_steps) if self._full_steps else None
        return summarize(self._case, number, self._answers, draft_s, step_s)


def _draft_seconds(engine: Engine) -> float:
    return sum(value for name, value in engine.counters().items() if name.startswith(_DRAFT_SECONDS))
