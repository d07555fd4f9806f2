"""Three kinds of load, made of held-out code, so that drafts are accepted as often as on real text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count

import msgspec
import numpy as np

from bench.serve.workload import LoadRequest

LEAST_REQUESTS = 16
"""Fewest requests of a probe: a share of fewer requests says little."""


class Traffic(msgspec.Struct, frozen=True):
    """Lengths in tokens of the prefix that all prompts share, of a prompt's own part, and of an answer. The
    search begins at `first_rate` [requests/s]; latencies are compared at `light_rate`.
    """

    name: str
    shared: int
    own: int
    output: int
    first_rate: float
    light_rate: float

    @property
    def prompt(self) -> int:
        return self.shared + self.own

    def scaled(self, factor: int) -> Traffic:
        """Return the same kind with texts `factor` times as long."""
        shared, own, output = (factor * length for length in (self.shared, self.own, self.output))
        return msgspec.structs.replace(self, shared=shared, own=own, output=output)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Traffic("chat", 512, 64, 64, 64.0, 8.0),
        Traffic("long-prompts", 0, 768, 16, 8.0, 2.0),
        Traffic("long-answers", 0, 48, 256, 8.0, 2.0),
    )
}


class Prompts:
    """Windows of one long text at different places. Prompts have only the shared prefix in common. Servers
    reuse it if `shares`, and nothing of prompts with another `name`.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], workload: Traffic, seed: int, name: str, shares: bool
    ) -> None:
        """Raise ValueError if the text is too short for different prompts."""
        self._name, self._shares, self._numbers = name, shares, count()
        self._tokens = list(chain.from_iterable(texts))
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        least = workload.shared + 8 * workload.own
        if len(self._tokens) < least:
            raise ValueError(
                f"the workload {workload.name} needs {least} tokens of text, got {len(self._tokens)}"
            )
        self._prefix = self._tokens[: workload.shared]

    def load(self, rate: float, seconds: float) -> list[LoadRequest]:
        """Return the requests that arrive in `seconds` at `rate`: rate x seconds uniform arrival times in
        order, a Poisson process with that number of arrivals. A low rate takes longer, to have
        `LEAST_REQUESTS` requests.
        """
        number = max(round(rate * seconds), LEAST_REQUESTS)
        arrivals = np.sort(self._rng.uniform(0, number / rate, number)).tolist()
        length = self._workload.output
        return [LoadRequest(self._prompt(), length, arrival, self._salt()) for arrival in arrivals]

    def _salt(self) -> str:
        return self._name if self._shares else f"{self._name} {next(self._numbers)}"

    def _prompt(self) -> list[int]:
        start = int(self._rng.integers(self._workload.shared, len(self._tokens) - self._workload.own))
        return self._prefix + self._tokens[start : start + self._workload.own]
