"""Engines in this process, side by side: one without speculation, and one for each way to speculate."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence

import msgspec

from bench.speculate.measurement import Answer, Measurement, summarize
from bench.speculate.plan import Case, Drafting
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.messages import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from speculation.speculator import speculate

_DRAFT_SECONDS = "spec_decode_draft_seconds_total"
_WARMING_TOKENS = 16


class Engines:
    """`config` is that of the engine without speculation. Requests ignore the end of text."""

    def __init__(self, config: ServeConfig, draftings: Sequence[Drafting], output_len: int) -> None:
        self._output_len = output_len
        self._plain = Engine(config, speculate=speculate)
        self._drafting = {
            drafting.label: Engine(
                msgspec.structs.replace(config, speculative_config=drafting.config), speculate=speculate
            )
            for drafting in draftings
        }
        self._runs = 0
        gc.collect()
        gc.freeze()  # as a worker does once it is ready

    @property
    def max_prompt_len(self) -> int:
        return self._plain.max_model_len - self._output_len

    def run(self, case: Case, number: int, prompts: Sequence[list[int]]) -> Measurement:
        """After a request that doesn't count: others have had the caches, and not all for equally long."""
        engine = self._plain if case.num_tokens is None else self._drafting[case.block.drafting]
        drive(engine, self._requests(case, prompts[:1], _WARMING_TOKENS), 1)
        requests = self._requests(case, prompts, self._output_len)
        drafting_before = _draft_seconds(engine)
        answers, step_times = drive(engine, requests, case.block.concurrency)
        return summarize(
            case,
            number,
            answers,
            draft_s=_draft_seconds(engine) - drafting_before,
            step_s=statistics.fmean(step_times) if step_times else None,
        )

    def close(self) -> None:
        for engine in (self._plain, *self._drafting.values()):
            engine.close()

    def _requests(self, case: Case, prompts: Sequence[list[int]], output_len: int) -> list[EngineRequest]:
        """With a salt of their own, so that no run profits from what an earlier one left."""
        self._runs += 1
        fixed = case.num_tokens if isinstance(case.num_tokens, int) else None
        return [
            EngineRequest(
                request_id=f"{self._runs}-{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=output_len,
                    temperature=case.block.temperature,
                    seed=index,
                    ignore_eos=True,
                ),
                cache_salt=str(self._runs),
                speculation=RequestSpeculation(num_speculative_tokens=fixed),
            )
            for index, prompt in enumerate(prompts)
        ]


def drive(
    engine: Engine, requests: Sequence[EngineRequest], concurrency: int
) -> tuple[list[Answer], list[float]]:
    """Keep `concurrency` requests running until all are done.

    Returns the answers in order, and the seconds of each step in which so many decoded and nothing else ran.
    Raises RuntimeError when a request fails.
    """
    waiting = list(reversed(requests))
    running: dict[str, Answer] = {}
    answers: dict[str, Answer] = {}
    step_times = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            request = waiting.pop()
            answer = answers[request.request_id] = running[request.request_id] = Answer(time.perf_counter())
            engine.add(request)
        started = time.perf_counter()
        outputs = engine.step().outputs
        now = time.perf_counter()
        is_full = len(outputs) == concurrency
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            answer = running[output.request_id]
            if not answer.token_ids:
                answer.first, is_full = now, False
            answer.last = now
            answer.token_ids += output.token_ids
            answer.steps += 1
            answer.draft_rounds += output.drafted_tokens > 0
            answer.drafted += output.drafted_tokens
            answer.accepted += output.accepted_tokens
            if output.finish_reason is not None:
                del running[output.request_id]
        if is_full:
            step_times.append(now - started)
    return [answers[request.request_id] for request in requests], step_times


def _draft_seconds(engine: Engine) -> float:
    return sum(value for name, value in engine.counters().items() if name.startswith(_DRAFT_SECONDS))
