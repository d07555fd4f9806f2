"""Random batches for the sampler's kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import SamplingRow
from tests.engine.sampler.test_sampler_native import FILTERS
from tests.engine.sampler_reference import make_row

EDITS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": {1: 3.0, 0: -2.5}},
    "allowed": {"allowed_token_ids": [0, 2, 3, 1], "logit_bias": {3: 2.0}},
    "banned": {"banned_token_sequences": [[2], [4, 1], [1, 4, 0]]},
    "not yet": {"min_tokens": 4, "stop_token_ids": [1]},
    "repetition": {"repetition_penalty": 1.3},
    "counts": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "all": {
        "logit_bias": {4: 5.0, 2: 1.0},
        "banned_token_sequences": [[0], [3]],
        "min_tokens": 9,
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.6,
    },
}


@dataclass(frozen=True)
class Case:
    filters: tuple[str, ...]
    edits: tuple[str, ...]
    vocab_size: int
    dtype: torch.dtype
    spread: float
    hole: float
    """The value of some logits."""
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
        holes = torch.rand(logits.shape, generator=generator) < 0.2
        holes[:, -1] = False
        return logits.masked_fill(holes, self.hole).to(self.dtype), rows


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 5))

    def names(of: Iterable[str]) -> tuple[str, ...]:
        return tuple(draw(st.lists(st.sampled_from(list(of)), min_size=count, max_size=count)))

    filters = names(FILTERS)
    return Case(
        filters,
        names(EDITS) if draw(st.booleans()) else ("none",) * count,
        draw(st.sampled_from([1, 6, 64, 65, 200, 333])),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([0.0, 0.3, 4.0])),
        draw(st.sampled_from([-math.inf, 0.0, -0.0])),
        draw(st.integers(0, 99)),
    )
