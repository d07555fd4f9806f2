"""The cost of a token: the formulas, and the worked example in LLM_SERVING.md."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import pytest

from bench.cost import cost_per_million
from planner.profile import DEFAULT_PROFILE, read_profile
from protocol.costs import StepCosts

DOCUMENT = Path(__file__).parents[2] / "LLM_SERVING.md"
PRICE = 3.0
PROMPT, OUTPUT = 1024, 256


def decode_tokens_per_s(costs: StepCosts, rows: float, context: float) -> float:
    return rows * costs.tokens_per_row / costs.decode_s(rows, rows * context)


def prefill_tokens_per_s(costs: StepCosts, length: int) -> float:
    return length / costs.chunks_s(length, 0, costs.chunk_tokens)


def cost_of_request(costs: StepCosts, price: float, prompt: int, output: int, rows: float) -> float:
    """Return the cost of a request's share of busy workers, prefill and decode, in batches of `rows`."""
    prefill_s = prompt / prefill_tokens_per_s(costs, prompt)
    decode_s = output / decode_tokens_per_s(costs, rows, prompt + output / 2)
    return price / 3600 * (prefill_s + decode_s)


def test_a_token_costs_its_share_of_the_workers_time() -> None:
    assert cost_per_million(3.6, 1, 1000.0) == pytest.approx(1.0)
    assert cost_per_million(3.6, 4, 1000.0) == pytest.approx(4.0)
    assert cost_per_million(3.6, 1, 0.0) == inf


def test_rates_follow_from_the_steps() -> None:
    costs = StepCosts(
        step_s=0.01,
        row_s=0.001,
        context_s=1e-6,
        token_s=1e-4,
        attention_s=1e-7,
        chunk_s=0.002,
        chunk_tokens=500,
    )
    assert decode_tokens_per_s(costs, 10, 1000) == pytest.approx(10 / (0.01 + 10 * 0.001 + 10 * 1000 * 1e-6))
    assert prefill_tokens_per_s(costs, 1000) == pytest.approx(1000 / (2 * 0.002 + 0.1 + 1e-7 * 1000 * 500))
    whole = cost_of_request(costs, 3600.0, 1000, 200, 10)
    assert whole == pytest.approx(0.154 + 200 * (0.03 + 10 * 100 * 1e-6) / 10)


def table() -> dict[str, list[str]]:
    """Return the rows of the worked example, by their first cell."""
    section = DOCUMENT.read_text().split("## What does a token cost?", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    return {row[0]: row[1:] for row in rows}


def test_the_worked_example_equals_the_codes_results() -> None:
    costs, rows = read_profile(DEFAULT_PROFILE).costs, table()
    for batch in (1, 16, 64):
        tokens_per_s = decode_tokens_per_s(costs, batch, PROMPT + OUTPUT / 2)
        expected = [
            f"{batch / tokens_per_s * 1e3:.2f}",
            f"{tokens_per_s:,.0f}",
            f"{cost_per_million(PRICE, 1, tokens_per_s):.2f}",
            f"{cost_of_request(costs, PRICE, PROMPT, OUTPUT, batch) * 1e6:,.0f}",
        ]
        assert rows[str(batch)] == expected
    prefill = prefill_tokens_per_s(costs, PROMPT)
    text = " ".join(DOCUMENT.read_text().split())
    assert f"{PROMPT / prefill * 1e3:.1f} ms, {prefill:,.0f} tokens a second" in text
    assert f"{cost_per_million(PRICE, 1, prefill):.3f} for a million" in text
    quoted = re.search(r"step_s = ([\d.]+) ms, row_s = (\d+) us, context_s = (\d+) ns", text)
    assert quoted is not None
    assert [float(part) for part in quoted.groups()] == pytest.approx(
        [costs.step_s * 1e3, costs.row_s * 1e6, costs.context_s * 1e9]
    )
