"""Batches for samplers: random ones, and those at the edges of what they compute."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import SamplingRow, gumbel_noise, stream_keys
from tests.engine.sampler_reference import make_row

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 5.0},
    "hottest": {"temperature": 100.0},
    "nearly greedy": {"temperature": 1e-40},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.3},
    "top-k -1": {"top_k": -1},
    "top-k 1": {"top_k": 1},
    "top-k": {"top_k": 7, "temperature": 2.0},
    "top-k of many": {"top_k": 200, "temperature": 3.0},
    "top-p tiny": {"top_p": 1e-9},
    "top-p": {"top_p": 0.6},
    "top-p of many": {"top_p": 0.97, "temperature": 4.0},
    "top-p nearly 1": {"top_p": 1 - 2**-53},
    "min-p": {"min_p": 0.02},
    "min-p 1": {"min_p": 1.0},
    "min-p, top-p": {"min_p": 0.001, "top_p": 0.9},
    "min-p, top-k": {"min_p": 0.05, "top_k": 20},
    "top-k, top-p": {"top_k": 30, "top_p": 0.8, "temperature": 1.5},
    "all": {"min_p": 0.01, "top_k": 50, "top_p": 0.9, "temperature": 1.3},
}

EDITS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": {1: 3.0, 0: -2.5}},
    "allowed": {"allowed_token_ids": [0, 2, 3, 1], "logit_bias": {3: 2.0}},
    "banned": {
        "banned_token_sequences": [[2], [4, 1], [1, 4, 0], [3, 3, 3, 3]],
        "logit_bias": {2: 20.0, 1: 19.0, 0: 18.0, 3: 17.0},
    },
    "not yet": {"min_tokens": 5, "stop_token_ids": [1], "logit_bias": {0: 20.0, 1: 20.0}},
    "ignored end": {"min_tokens": 5, "stop_token_ids": [1], "ignore_eos": True, "logit_bias": {0: 20.0}},
    "repetition": {"repetition_penalty": 1.7},
    "counts": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "many": {
        "logit_bias": {4: 5.0, 2: 1.0},
        "banned_token_sequences": [[0], [3]],
        "min_tokens": 9,
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.6,
    },
}

PARAMS = FILTERS | {name: edits for name, edits in EDITS.items() if name not in FILTERS}


@dataclass(frozen=True)
class Case:
    filters: tuple[str, ...]
    edits: tuple[str, ...]
    vocab_size: int
    dtype: torch.dtype
    spread: float
    hole: float
    """The value of some logits."""
    share: float
    """The share of these: few, or so many that whole runs of tokens have no other."""
    seed: int

    def batch(self) -> tuple[Tensor, list[SamplingRow]]:
        rng, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        tokens = min(5, self.vocab_size)
        rows = []
        for number, (filters, edits) in enumerate(zip(self.filters, self.edits, strict=True)):
            before = [[rng.randrange(tokens) for _ in range(rng.randrange(9))] for _ in range(2)]
            params = FILTERS[filters] | (EDITS[edits] if self.vocab_size > 5 else {})
            rows.append(make_row(str(number), *before, seed=rng.randint(-(2**63), 2**63 - 1), **params))
        logits = self.spread * torch.randn(len(rows), self.vocab_size, generator=generator)
        holes = torch.rand(logits.shape, generator=generator) < self.share
        holes[:, -1] = False
        return logits.masked_fill(holes, self.hole).to(self.dtype), rows


@st.composite
def cases(draw: st.DrawFn, vocab_sizes: Sequence[int] = (1, 6, 64, 65, 200, 333), most_rows: int = 5) -> Case:
    count = draw(st.integers(1, most_rows))

    def names(of: Iterable[str]) -> tuple[str, ...]:
        return tuple(draw(st.lists(st.sampled_from(list(of)), min_size=count, max_size=count)))

    filters = names(FILTERS)
    return Case(
        filters,
        names(EDITS) if draw(st.booleans()) else ("none",) * count,
        draw(st.sampled_from(vocab_sizes)),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([0.0, 0.3, 4.0])),
        draw(st.sampled_from([-math.inf, 0.0, -0.0])),
        draw(st.sampled_from([0.2, 0.99])),
        draw(st.integers(0, 99)),
    )


def make_rows(count: int, generator: random.Random, names: list[str] | None = None) -> list[SamplingRow]:
    """Return rows of several requests and positions, with these filters in turn."""
    names = names or list(FILTERS)
    rows = []
    for number in range(count):
        params = FILTERS[names[number % len(names)]]
        rows.append(make_row(str(number), seed=generator.randint(-(2**63), 2**63 - 1), **params))
        rows[-1].position = generator.choice([number, generator.randrange(10**6)])
    return rows


def equal_scores(one: int, other: int, temperature: float = 1.0) -> Iterator[tuple[SamplingRow, Tensor]]:
    """Return rows in which two of 200 tokens share the highest score: `one` has the greater logit, `other`
    correspondingly more noise.
    """
    for seed in range(100):
        noise = gumbel_noise(stream_keys(torch.tensor([seed]), torch.tensor([3])), torch.arange(200))
        logits = torch.full((1, 200), -1000.0)
        logits[0, one] = 0.0
        logits[0, other] = temperature * (noise[one] - noise[other])
        if logits[0, other] <= 0 and logits[0, other] / temperature + noise[other] == noise[one]:
            yield make_row(seed=seed, temperature=temperature), logits


def exact_nuclei(second: float) -> Iterator[tuple[Tensor, float, float]]:
    """Return logits of three tokens, a `top_p` that equals the likeliest one's share after top-k 2, and one
    just above it. The second logit is `second` and decreases.
    """
    for step in range(50):
        logits = torch.tensor([[0.0, second - step / 16, -90.0]])
        share = math.exp(float(logits[0, 1]))
        total = 1 + share
        if total - share == 1 and 1 / total * total == 1:  # else it is rounded
            yield logits, 1 / total, 1 / total * (1 + 1e-14)
