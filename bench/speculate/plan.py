"""The cases to measure, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from bench.speculate.workload import WorkloadName, WorkloadPrompt
from bench.turns import in_round
from deploy.config import speculative_config
from models.bundled import bundled_draft
from protocol.errors import ConfigError
from protocol.speculation import METHODS, MODEL_METHODS, Method, SpeculativeConfig

NumTokens = int | Literal["auto"]


class Drafting(msgspec.Struct, frozen=True):
    """A way to speculate, and its label in the results."""

    label: str
    config: SpeculativeConfig


def parse_drafting(spec: str, model: str) -> Drafting:
    """Parse a method's name, or LABEL=JSON with a speculative config. Raises `ConfigError`."""
    label, equals, options = spec.partition("=")
    if not equals:
        options = msgspec.json.encode({"method": spec}).decode()
    if not label or not (equals or label in METHODS):
        raise ConfigError(f"--method: {spec!r} is none of {', '.join(METHODS)}, and no LABEL=JSON")
    return Drafting(label, speculative_config(options, f"--method {label}", model))


def methods_of(model: str) -> list[Method]:
    """Return the methods that need no weights, or that have bundled ones for this model."""
    return [each for each in METHODS if each not in MODEL_METHODS or bundled_draft(model, each) is not None]


def parse_num_tokens(text: str) -> NumTokens:
    """Parse a K or `auto`. Raises ValueError."""
    return "auto" if text == "auto" else int(text)


class CaseGroup(msgspec.Struct, frozen=True):
    """Cases to compare with each other: one load, one way to speculate."""

    workload: WorkloadName
    temperature: float
    concurrency: int
    drafting: str


class Case(msgspec.Struct, frozen=True):
    """One measured case. `num_tokens` is K; None means an engine, or a request, without speculation."""

    block: CaseGroup
    num_tokens: NumTokens | None

    def __str__(self) -> str:
        block = self.block
        what = "off" if self.num_tokens is None else f"{block.drafting} K={self.num_tokens}"
        return f"{block.workload}, T={block.temperature:g}, concurrency {block.concurrency}: {what}"


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    workloads: Sequence[WorkloadName]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    draftings: Sequence[Drafting]
    num_tokens: Sequence[NumTokens]
    rounds: int
    requests: int
    """Fewest requests of a case; a higher concurrency raises the number."""
    output_len: int

    def blocks(self, drafting: Drafting) -> list[CaseGroup]:
        return [
            CaseGroup(workload, temperature, concurrency, drafting.label)
            for workload in self.workloads
            for temperature in self.temperatures
            for concurrency in self.concurrencies
        ]

    def cases(self, block: CaseGroup, number: int) -> Sequence[Case]:
        """Return the baseline and every K, in reverse in every second round, so that a drift cancels out."""
        cases = [Case(block, None), *(Case(block, num_tokens) for num_tokens in self.num_tokens)]
        return in_round(cases, number)

    def chosen(
        self, prompts: Sequence[WorkloadPrompt], concurrency: int, number: int
    ) -> list[WorkloadPrompt]:
        """Return a round's prompts: the same for all cases of a concurrency. Each comes once, or again if
        there are fewer than requests.
        """
        count = max(self.requests, concurrency)
        first = number * count
        return [
            prompts[(first + index) % len(prompts)]._replace(copy=index // len(prompts))
            for index in range(count)
        ]
