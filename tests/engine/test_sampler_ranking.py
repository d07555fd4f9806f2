"""The likeliest choices, best first: the first is what the sampler would choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampler import Sampler, SamplingRow, gumbel_noise, ranking, stream_keys
from protocol.sampling import SamplingParams

VOCAB_SIZE = 90
"""Fewer than are looked at, so that ranks are exact."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.5, "seed": -8, "top_k": 7},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05},
    {"temperature": 0.9, "seed": 5, "logit_bias": {4: 3.0}, "allowed_token_ids": list(range(40))},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.6},
]


def rows_of(kinds: list[dict[str, Any]]) -> list[SamplingRow]:
    return [
        SamplingRow(SamplingParams(max_tokens=9, **kind), [1, 2], [3, 3, 4], 5 + index, f"r{index}")
        for index, kind in enumerate(kinds)
    ]


def logits_for(count: int, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return 3 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[1:3]])
def test_the_first_is_what_would_be_chosen(kinds: list[dict[str, Any]], seed: int) -> None:
    sampler = Sampler(VOCAB_SIZE, "cpu", [])
    logits = logits_for(len(kinds), seed)
    ranked = sampler.rank(logits, rows_of(kinds), 5)
    assert ranked[:, 0].tolist() == sampler.sample(logits, rows_of(kinds)).token_ids
    assert all(len(set(row)) == 5 for row in ranked.tolist())
    assert torch.equal(sampler.rank(logits, rows_of(kinds), 1), ranked[:, :1])


def test_ranks_descend_in_value_and_noise() -> None:
    kind = KINDS[1]
    logits = logits_for(1, 9)
    ranked = Sampler(VOCAB_SIZE, "cpu", []).rank(logits, rows_of([kind]), 12)[0]
    key = stream_keys(torch.tensor([kind["seed"]]), torch.tensor([5]))
    scores = logits[0] / kind["temperature"] + gumbel_noise(key, torch.arange(VOCAB_SIZE))
    assert torch.equal(ranked, scores.topk(12).indices)
    greedy = Sampler(VOCAB_SIZE, "cpu", []).rank(logits, rows_of(KINDS[:1]), 12)[0]
    assert torch.equal(greedy, logits[0].topk(12).indices)


def test_what_the_filters_drop_comes_last() -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 1.0, "seed": seed, "top_k": 3} for seed in range(8)]
    logits = logits_for(8, 1)
    ranked = Sampler(VOCAB_SIZE, "cpu", []).rank(logits, rows_of(kinds), 6)
    best = logits.topk(3).indices
    for row in range(8):
        assert set(ranked[row, :3].tolist()) == set(best[row].tolist())


def test_large_vocabularies_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise lifts a token from far down: it is found if it is looked at, and only then."""
    kind: dict[str, Any] = {"temperature": 100.0, "seed": 2}
    logits = logits_for(1, 1, 1000)
    sampler = Sampler(1000, "cpu", [])
    likeliest = set(logits[0].topk(ranking.LOOKED_AT).indices.tolist())
    assert set(sampler.rank(logits, rows_of([kind]), 10)[0].tolist()) <= likeliest
    monkeypatch.setattr(ranking, "LOOKED_AT", 1000)
    everywhere = sampler.rank(logits, rows_of([kind]), 10)[0].tolist()
    assert not set(everywhere) <= likeliest
    assert everywhere[:1] == sampler.sample(logits, rows_of([kind])).token_ids
