"""Measures a server with our API, where each request asks for its own speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.workload import LoadRequest
from bench.speculate.measurement import Measurement, TimedAnswer, summarize
from bench.speculate.plan import Case


class SpeculatingServer:
    """A running server. Its method must be the measured one, unless the measured one needs no weights."""

    def __init__(
        self, base_url: str, api_key: str | None, methods: Mapping[str, str], output_len: int
    ) -> None:
        """`methods` maps labels to methods. Raises ValueError if the server does not answer."""
        self._base_url, self._api_key = base_url, api_key
        self._methods = methods
        self._output_len = output_len
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise ValueError(f"--base-url: {base_url}: {error}") from error
        card = answer.json()["data"][0]
        self._model = card["id"]
        self.max_prompt_len = card["max_model_len"] - output_len
        self._runs = 0

    def run(self, cases: Sequence[Case], number: int, prompts: Sequence[list[int]]) -> list[Measurement]:
        """Run the cases one after the other. Raises RuntimeError if a request fails."""
        return [self._run(case, number, prompts) for case in cases]

    def _run(self, case: Case, number: int, prompts: Sequence[list[int]]) -> Measurement:
        self._runs += 1
        target = ServerTarget(
            base_url=self._base_url,
            model=self._model,
            ignore_eos=True,
            temperature=case.block.temperature,
            api_key=self._api_key,
            extra_body={
                "seed": 0,
                "cache_salt": f"bench-{self._runs}",
                "return_token_ids": True,
                "speculative": self._speculative(case),
            },
        )
        requests = [LoadRequest(prompt, self._output_len) for prompt in prompts]
        records = run_on_fast_loop(drive(Client(target), requests, case.block.concurrency))
        return summarize(case, number, [_answer(record) for record in records])

    def close(self) -> None:
        return

    def _speculative(self, case: Case) -> dict[str, Any]:
        if case.num_tokens is None:
            return {"enabled": False}
        asked: dict[str, Any] = {"method": self._methods[case.block.drafting]}
        return asked if case.num_tokens == "auto" else asked | {"num_speculative_tokens": case.num_tokens}


def _answer(record: Record) -> TimedAnswer:
    """Convert a record. Each piece of the stream counts as a step; the number of steps with a draft is
    unknown.
    """
    if record.error:
        raise RuntimeError(f"a request failed: {record.error}: {record.detail}")
    return TimedAnswer(
        start=record.start,
        first=record.token_times[0],
        last=record.end,
        token_ids=record.token_ids,
        steps=len(record.token_times),
        drafted=record.accepted_tokens + record.rejected_tokens,
        accepted=record.accepted_tokens,
    )
