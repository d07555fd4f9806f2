"""Measurement of a running server: bursts of requests of every size, then the workers' reports.

Workers fit their step times and wire speeds under this load, which includes the influence of the router and
of this client on the same machine.
"""

from __future__ import annotations

import asyncio
import random
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from costs.steps import Regression
from planner.profile import LinkProfile, Profile
from protocol.costs import StepCosts
from protocol.errors import TandemError
from protocol.speculation import MethodState, SpeculationState
from router.placement.interface import LinkSpeed

BURSTS = (1, 2, 4, 8, 16, 32)
"""Sizes of bursts: requests that come at about the same time. While a burst ends, its batch passes through
all smaller sizes.
"""
ROUNDS = 4
"""Number of rounds; the first round warms up."""
NUM_BURSTS = len(BURSTS) * ROUNDS
SPREAD_S = 0.4
"""Seconds over which a burst's requests are spread."""
LONGEST_PROMPT, LONGEST_OUTPUT = 1024, 96
LONE_REQUESTS = 3
"""Number of lone requests of each length, and of as many while another request decodes. Medians count."""
LONE_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Prompt lengths as shares of the longest chunk."""
LONE_PAUSE_S = 0.05
"""Seconds after which the other request decodes."""
PACED_REQUESTS = 4
"""Number of requests that decode alone, and of as many while prompts are computed."""
MADE_SHARE = 0.25
"""Share of the worker's own time for a step below which tokens came faster than they were made."""
MOST_REPEATS = 3
"""How often such a paced request is sent again."""
DRAFT_BURSTS = (1, 2, 4, 8, 16)
"""Sizes of bursts of requests that continue text, if the server drafts. (Random tokens cannot be drafted.)"""
DRAFT_ROUNDS = 3
REPORTED_S = 0.5
"""Seconds after which a heartbeat has brought the workers' measurements."""
TEXT_LENGTH, TEXT_OUTPUT = 1000, 64
"""[characters], [tokens]"""
ALWAYS_SPLIT = ("--placement", "least_loaded")
"""Options that the server needs for calibration, so that wires are used and each role does its own work."""
_VOCAB = range(16, 256)
"""Token ids that every model has."""
_TIMEOUT_S = 300.0


class CalibrationError(TandemError):
    """The server did not do what the calibration requires."""


def calibrate(
    url: str,
    sources: Sequence[str],
    api_key: str | None = None,
    on_burst: Callable[[], None] = lambda: None,
) -> Profile:
    """Return the profile of an idle server's workers. Raises `CalibrationError`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, headers=headers) as http:
        return _Calibration(http, on_burst).run(sources)


class Pace(NamedTuple):
    """Seconds to an answer's first token, from the first to the second, and per further token on average."""

    first_s: float
    second_s: float = 0.0
    step_s: float = 0.0


class _Calibration:
    def __init__(self, http: httpx.Client, on_burst: Callable[[], None]) -> None:
        self._http, self._on_burst = http, on_burst
        parts = urlsplit(str(http.base_url))
        self._host, self._port = parts.hostname or "", parts.port or 80
        card = self._get("/v1/models")["data"][0]
        self._model, self._longest = card["id"], int(card["max_model_len"])
        self._random = random.Random()  # unseeded: prompts of an earlier calibration are cached on the server

    def run(self, sources: Sequence[str]) -> Profile:
        looks = []
        for number in range(ROUNDS):
            for size in self._random.sample(BURSTS, len(BURSTS)):
                asyncio.run(self._burst(size))
                self._on_burst()
                if number > 0:
                    looks.append(self._get("/cluster"))
        costs = decode_costs([worker for look in looks for worker in look["workers"]])
        longest = min(costs.chunk_tokens, self._longest // 2)
        alone = asyncio.run(self._prompts(self._alone, longest))
        beside = asyncio.run(self._prompts(self._beside_another, longest))
        first_s = {tokens: pace.first_s for tokens, pace in alone.items()}
        costs, request_s = with_prompts(costs, first_s)
        link = _link(looks[-1]["links"])
        return Profile(
            name=self._model,
            sources=list(sources),
            costs=costs,
            link=link,
            kv_tokens=min(worker["kv"]["tokens"] for worker in looks[-1]["workers"]),
            request_s=request_s,
            handoff_s=measured_handoff_s(costs, link, alone),
            prefill_beside=times_as_long((pace.first_s for pace in beside.values()), first_s.values()),
            decode_beside=asyncio.run(self._decode_beside(longest, MADE_SHARE * costs.decode_s(1, 1))),
            speculation=self._drafts(),
        )

    def _drafts(self) -> SpeculationState | None:
        """Return the statistics of drafts for requests that continue source code of Python's library, some of
        them greedy; None if the server does not draft.
        """
        if not any(_speculation(worker).max_tokens for worker in self._get("/workers")["workers"]):
            return None
        texts = _texts(min(TEXT_LENGTH, self._longest // 2))
        for number in range(DRAFT_ROUNDS):
            for size in self._random.sample(DRAFT_BURSTS, len(DRAFT_BURSTS)):
                asyncio.run(self._continue(self._random.choices(texts, k=size), float(number % 2)))
        time.sleep(REPORTED_S)
        return drafts_of([_speculation(worker) for worker in self._get("/workers")["workers"]])

    async def _continue(self, texts: Sequence[str], temperature: float) -> None:
        async with asyncio.TaskGroup() as group:
            for text in texts:
                tokens = min(TEXT_OUTPUT, self._longest // 4)
                group.create_task(self._ask(text, tokens, temperature, drafts=True))

    async def _burst(self, size: int) -> None:
        async def one() -> None:
            await asyncio.sleep(self._random.uniform(0, SPREAD_S))
            longest = min(LONGEST_PROMPT, self._longest // 2)
            prompt = self._tokens(round(2 ** self._random.uniform(4, longest.bit_length() - 1)))
            await self._ask(prompt, self._random.randint(8, min(LONGEST_OUTPUT, self._longest // 4)))

        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                group.create_task(one())

    async def _prompts(self, ask: Callable[[int], Awaitable[Pace]], longest: int) -> dict[int, Pace]:
        """Return the pace measured by `ask` for each prompt length, for requests that run alone."""
        lengths = sorted({max(int(share * longest), 1) for share in LONE_SHARES})
        return {tokens: _median([await ask(tokens) for _ in range(LONE_REQUESTS)]) for tokens in lengths}

    async def _alone(self, tokens: int) -> Pace:
        return await self._ask(self._tokens(tokens), 2)

    async def _beside_another(self, tokens: int) -> Pace:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._long_answer())
            await asyncio.sleep(LONE_PAUSE_S)
            return await self._alone(tokens)

    async def _decode_beside(self, longest: int, least_s: float) -> float:
        """Return the ratio of decode step times while the prefill worker works to those while it is idle."""
        alone = [await paced(self._long_answer, least_s) for _ in range(PACED_REQUESTS)]
        async with asyncio.TaskGroup() as group:
            prompts = group.create_task(self._keep_busy(longest))
            beside = [await paced(self._long_answer, least_s) for _ in range(PACED_REQUESTS)]
            prompts.cancel()
        return times_as_long([_median(beside).step_s], [_median(alone).step_s])

    async def _keep_busy(self, tokens: int) -> None:
        while True:
            await self._ask(self._tokens(tokens), 1)

    async def _long_answer(self) -> Pace:
        return await self._ask(self._tokens(1), min(LONGEST_OUTPUT, self._longest // 4))

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(_VOCAB, k=count)

    async def _ask(
        self, prompt: str | list[int], max_tokens: int, temperature: float = 0.0, *, drafts: bool = False
    ) -> Pace:
        """Send a request, with or without drafts, and measure its pace. It reads as little of the answer as
        possible, since it shares the cores with the server.
        """
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"ignore_eos": True, "stream": True, "speculative": {"enabled": drafts}}
        content = msgspec.json.encode(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        if "authorization" in self._http.headers:
            head += f"Authorization: {self._http.headers['authorization']}\r\n"
        started, received = time.perf_counter(), b""
        times: list[float] = []
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(f"{head}\r\n".encode() + content)
            while data := await reader.read(65536):
                received += data
                came = min(received.count(b"\ndata: {"), max_tokens) - len(times)
                times += [time.perf_counter() - started] * came
            writer.close()
        if b"[DONE]" not in received[-64:]:
            raise CalibrationError(f"a request of {max_tokens} tokens failed: {received[:300]!r}")
        return _pace(times)

    def _get(self, path: str) -> Any:
        try:
            return self._http.get(path).raise_for_status().json()
        except httpx.HTTPError as error:
            raise CalibrationError(f"{self._http.base_url}{path}: {error}") from error


def _pace(times: Sequence[float]) -> Pace:
    first_s, *later = times
    if not later:
        return Pace(first_s)
    return Pace(first_s, later[0] - first_s, (later[-1] - later[0]) / max(len(later) - 1, 1))


async def paced(ask: Callable[[], Awaitable[Pace]], least_s: float) -> Pace:
    """Return the pace of an answer with at least `least_s` a token, or the slowest of some. Tokens that come
    faster than they are made have waited, as for a core of the router's.
    """
    found = [await ask()]
    while found[-1].step_s < least_s and len(found) <= MOST_REPEATS:
        found.append(await ask())
    return max(found, key=lambda pace: pace.step_s)


def _median(paces: Sequence[Pace]) -> Pace:
    return Pace(*(median(values) for values in zip(*paces, strict=True)))


def times_as_long(beside: Iterable[float], alone: Iterable[float]) -> float:
    """Return the ratio of times measured while another worker works to times measured alone, at least 1."""
    beside_s, alone_s = sum(beside), sum(alone)
    return max(beside_s / alone_s, 1.0) if alone_s > 0 else 1.0


def measured_handoff_s(costs: StepCosts, link: LinkProfile, alone: Mapping[int, Pace]) -> float:
    """Return the seconds from a lone prompt's first token to its second, less the wire's and a step's."""
    wire = LinkSpeed(link.latency_s, link.bytes_per_s)
    rest = [
        pace.second_s - wire.seconds(tokens * costs.kv_bytes) - costs.decode_s(1, tokens)
        for tokens, pace in alone.items()
    ]
    return max(median(rest), 0.0)


def decode_costs(workers: Sequence[dict[str, Any]]) -> StepCosts:
    """Return the decoding costs from several reports of decode workers."""
    names = ("step_s", "row_s", "context_s", "tokens_per_row")
    costs = [worker["costs"] for worker in workers if worker["role"] == "decode"]
    means = {name: fmean(each[name] for each in costs) for name in names}
    return msgspec.convert(costs[-1] | means, StepCosts)


def with_prompts(costs: StepCosts, took: Mapping[int, float]) -> tuple[StepCosts, float]:
    """Return `costs` with the weights of prompts, and the seconds that a request spends outside of workers,
    both fitted to the times to the first token of lone requests with one prefill chunk.

    Workers fit prompts, too, but to steps that other programs disturb, above all the long ones.
    """
    seconds = np.array(list(took.values()))
    features = np.array([(1.0, tokens, tokens * tokens / 2) for tokens in took])
    fit = Regression(3, inf)
    fit.learn(features, seconds)
    once_s, token_s, attention_s = fit.weights.tolist()
    prompt = {"chunk_s": 0.0, "token_s": token_s, "attention_s": attention_s}
    return msgspec.structs.replace(costs, **prompt), max(once_s - costs.step_s, 0.0)


def _speculation(worker: dict[str, Any]) -> SpeculationState:
    return msgspec.convert(worker.get("speculation") or {}, SpeculationState)


def drafts_of(reports: Sequence[SpeculationState]) -> SpeculationState | None:
    """Return the report with the most statistics of methods that have drafted, or None if none has."""

    def known(state: SpeculationState) -> list[MethodState]:
        return [method for method in state.methods if method.acceptance]

    best = max(reports, key=lambda state: sum(len(method.acceptance) for method in known(state)))
    methods = [msgspec.structs.replace(each, num_requests=0, num_tokens=0) for each in known(best)]
    return msgspec.structs.replace(best, methods=methods, draft_answers={}) if methods else None


def _texts(length: int) -> list[str]:
    modules = sorted(Path(textwrap.__file__).parent.glob("*.py"))
    sources = [path.read_text("utf-8", "replace") for path in modules]
    return [text[at : at + length] for text in sources for at in range(0, len(text) - length, 20_000)]


def _link(links: Sequence[dict[str, Any]]) -> LinkProfile:
    measured = [link for link in links if link["bytes_per_s"] > 0]
    if not measured:
        raise CalibrationError("no wire between workers was used: at least one of each role is needed")
    return LinkProfile(
        latency_s=fmean(link["latency_s"] for link in measured),
        bytes_per_s=fmean(link["bytes_per_s"] for link in measured),
    )
