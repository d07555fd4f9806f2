"""A day's arrivals: quiet at night, two tides, and half an hour of a rush."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from planner.trace import TRACE_BLOCK_TOKENS, TraceRequest

DAY_S = 86_400.0
NIGHT = 0.25
"""Of the rate at the higher tide."""
TIDES = ((10.5, 2.0, 0.75), (16.0, 2.5, 0.55))
"""Hours of the day, hours of width, and height above the night."""
RUSH = (13.0, 13.5, 1.5)
"""Hours, and the factor on the rate between them."""
TOPICS = 200
"""Texts that prompts begin with."""


def rate(seconds: np.ndarray) -> np.ndarray:
    """Relative to the night's."""
    hours = seconds / 3600
    tides = sum(height * np.exp(-(((hours - at) / width) ** 2)) for at, width, height in TIDES)
    begin, end, factor = RUSH
    return (NIGHT + tides) * np.where((hours >= begin) & (hours < end), factor, 1.0)


def arrivals(count: int, seed: int, day_s: float = DAY_S) -> list[float]:
    """So many of a Poisson process with this rate, in order, over a day that may be shorter."""
    at = np.linspace(0.0, DAY_S, 24 * 60 + 1)
    sums = np.concatenate(([0.0], np.cumsum(rate((at[1:] + at[:-1]) / 2))))
    chosen = np.sort(np.random.default_rng(seed).random(count))
    found: list[float] = (np.interp(chosen * sums[-1], sums, at) * day_s / DAY_S).tolist()
    return found


def synthetic(
    count: int, seed: int, mean_input: int, mean_output: int, day_s: float = DAY_S
) -> list[TraceRequest]:
    """Lengths are spread as exponentials are, to three times the mean; half of a prompt is its topic's."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * min(rng.expovariate(1.0), 3.0)))

    requests = []
    for number, at in enumerate(arrivals(count, seed, day_s)):
        input_len, topic = length(mean_input), rng.randrange(TOPICS)
        blocks = -(-input_len // TRACE_BLOCK_TOKENS)
        shared = [topic * 1000 + block for block in range(blocks // 2)]
        own = [10**6 * (number + 1) + block for block in range(blocks - len(shared))]
        requests.append(TraceRequest(at, input_len, length(mean_output), shared + own))
    return requests


def over_a_day(requests: Sequence[TraceRequest], seed: int, day_s: float = DAY_S) -> list[TraceRequest]:
    """The requests of a trace, in its order, at a day's times."""
    times = arrivals(len(requests), seed, day_s)
    return [
        TraceRequest(at, each.input_len, each.output_len, each.hash_ids)
        for at, each in zip(times, requests, strict=True)
    ]
