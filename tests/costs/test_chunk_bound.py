"""Prompt chunks beside decoding sequences keep within the time budget. Without decoding there is no bound."""

from __future__ import annotations

import pytest

from costs.steps import ChunkBound
from protocol.costs import StepCosts

COSTS = StepCosts(step_s=2e-3, row_s=1e-3, context_s=0.0, chunk_s=1e-3, token_s=1e-4, attention_s=1e-7)


def bound(budget_s: float) -> ChunkBound:
    return ChunkBound(lambda: COSTS, budget_s, 16)


def test_a_step_keeps_within_its_budget():
    chunks = bound(0.05)
    chunks.begin(rows=8, context=0)
    for before in (0, 1000):
        chunks.begin(rows=8, context=0)
        count = chunks.tokens(512, before)
        assert COSTS.decode_s(8, 0) + COSTS.chunks_s(count, before, 512) == pytest.approx(0.05, rel=0.01)
        assert chunks.is_full and chunks.tokens(512, 0) == 0


def test_a_smaller_bound_that_a_request_asks_for_applies():
    chunks = bound(0.05)
    for slo_tpot_s, seconds in ((0.03, 0.024), (0.05, 0.04), (0.0625, 0.05), (1.0, 0.05)):
        chunks.begin(8, 0, slo_tpot_s)
        count = chunks.tokens(512, 0)
        assert COSTS.decode_s(8, 0) + COSTS.chunks_s(count, 0, 512) == pytest.approx(seconds, rel=0.01)
    without = bound(0.0)
    without.begin(8, 0, 0.03)
    assert without.tokens(512, 0) == 512, "the operator wants no bound"


def test_small_prompts_share_a_step():
    chunks = bound(0.05)
    chunks.begin(rows=8, context=0)
    first, second, third = (chunks.tokens(150, 0) for _ in range(3))
    assert (first, second) == (150, 150) and 16 <= third < 150
    assert chunks.is_full


def test_there_is_no_bound_without_budget_or_without_decoding():
    for chunks, rows in ((bound(0.0), 8), (bound(1e-6), 0)):
        chunks.begin(rows=rows, context=0)
        assert chunks.tokens(10_000, 10_000) == 10_000 and not chunks.is_full


def test_prompts_progress_even_if_decoding_alone_exceeds_the_budget():
    chunks = bound(1e-6)
    chunks.begin(rows=8, context=0)
    count = chunks.tokens(512, 0)
    assert COSTS.chunks_s(count, 0, 512) == pytest.approx(COSTS.decode_s(8, 0), rel=0.02)
    chunks.begin(rows=1, context=0)
    assert chunks.tokens(512, 10**7) == 16, "a block, whatever it takes"
