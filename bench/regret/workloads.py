"""Twelve loads, scaled to the machine: rates are requests per unit, the time that a lone request takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.serve.workload import LoadRequest, random_tokens
from bench.speculate.workload import entries

ALONE_INPUT_LEN, ALONE_OUTPUT_LEN = 256, 128
"""The lone request whose time is the unit of rates and objectives."""
GIANT_LEN = 3_900


@dataclass(frozen=True)
class Chain:
    """Requests that one client sends, each after the answer to the one before, from `start` [s] until the
    workload's end. `patience`: its objective for TTFT, in units. `has_ttft` and `has_gaps` tell which of its
    latencies count.
    """

    requests: Iterator[LoadRequest]
    start: float = 0.0
    patience: float = 1.0
    has_ttft: bool = True
    has_gaps: bool = True


class Draw:
    """A source of prompts and arrival times of a workload of `seconds`; a lone request takes `unit` [s]."""

    def __init__(self, rng: np.random.Generator, vocab_size: int, seconds: float, unit: float) -> None:
        self._rng, self._vocab_size = rng, vocab_size
        self.seconds, self._unit = seconds, unit

    def random(self, input_len: int, output_len: int) -> LoadRequest:
        return LoadRequest(self.tokens(input_len), output_len)

    def tokens(self, count: int) -> list[int]:
        return random_tokens(self._rng, count, self._vocab_size)

    def real(self, known: Sequence[dict[str, Any]], output_len: int) -> LoadRequest:
        """Return one of the known questions (`bench.speculate.workload.entries`)."""
        return LoadRequest(known[int(self._rng.integers(len(known)))]["prompt"], output_len)

    def arriving(
        self, per_unit: float, make: Callable[[], LoadRequest], patience: float = 1.0, has_gaps: bool = True
    ) -> list[Chain]:
        """Return single requests that arrive as a Poisson process, `per_unit` of them per unit of time."""
        count = max(1, round(per_unit / self._unit * self.seconds))
        starts = np.sort(self._rng.uniform(0, self.seconds, count)).tolist()
        return [Chain(iter([make()]), start, patience, has_gaps=has_gaps) for start in starts]

    def at_once(self, count: int, start: float, input_len: int, output_len: int) -> list[Chain]:
        return [Chain(iter([self.random(input_len, output_len)]), start, 4.0) for _ in range(count)]


def _chat(draw: Draw) -> list[Chain]:
    known = entries("chat")
    return draw.arriving(2.0, lambda: draw.real(known, 128))


def _streams(draw: Draw) -> list[Chain]:
    streams = [
        Chain((draw.random(64, 256) for _ in itertools.count()), has_ttft=False, patience=4.0)
        for _ in range(8)
    ]
    return streams + draw.arriving(1.2, lambda: draw.random(1500, 8), patience=2.0, has_gaps=False)


def _summaries(draw: Draw) -> list[Chain]:
    return draw.arriving(0.8, lambda: draw.random(1500, 48), patience=2.0)


def _edits(draw: Draw) -> list[Chain]:
    known = entries("rewrite")
    return draw.arriving(1.2, lambda: draw.real(known, 192))


def _agents(draw: Draw) -> list[Chain]:
    def turns() -> Iterator[LoadRequest]:
        history = draw.tokens(400)
        while len(history) < GIANT_LEN - 200:
            yield LoadRequest(list(history), 32)
            history += draw.tokens(160)

    return [Chain(turns()) for _ in range(4)]


def _bursts(draw: Draw) -> list[Chain]:
    starts = np.arange(0.0, draw.seconds, draw.seconds / 3).tolist()
    return [chain for start in starts for chain in draw.at_once(12, start, 256, 32)]


def _giant(draw: Draw) -> list[Chain]:
    giant = Chain(iter([draw.random(GIANT_LEN, 16)]), draw.seconds / 3, patience=6.0, has_gaps=False)
    return [*draw.arriving(1.5, lambda: draw.random(128, 96)), giant]


def _prefixes(draw: Draw) -> list[Chain]:
    prefixes = [draw.tokens(1000) for _ in range(3)]
    of_three = itertools.cycle(prefixes)
    return draw.arriving(2.0, lambda: LoadRequest(next(of_three) + draw.tokens(50), 64))


def _short_answers(draw: Draw) -> list[Chain]:
    return draw.arriving(6.0, lambda: draw.random(256, 4))


def _long_answers(draw: Draw) -> list[Chain]:
    return [Chain(draw.random(64, 512) for _ in itertools.count()) for _ in range(6)]


def _mixed_objectives(draw: Draw) -> list[Chain]:
    hasty = draw.arriving(2.0, lambda: draw.random(64, 64), patience=0.5)
    return hasty + draw.arriving(0.4, lambda: draw.random(1500, 128), patience=8.0)


def _idle_then_burst(draw: Draw) -> list[Chain]:
    return draw.at_once(1, 0.0, 256, 32) + draw.at_once(16, draw.seconds / 2, 512, 64)


WORKLOADS: dict[str, Callable[[Draw], list[Chain]]] = {
    "chat": _chat,
    "streams": _streams,
    "summaries": _summaries,
    "edits": _edits,
    "agents": _agents,
    "bursts": _bursts,
    "giant": _giant,
    "prefixes": _prefixes,
    "short-answers": _short_answers,
    "long-answers": _long_answers,
    "mixed-objectives": _mixed_objectives,
    "idle-then-burst": _idle_then_burst,
}
