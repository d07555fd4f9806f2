"""Simulated admission for an SLO: requests that would be in time are taken, and overload costs no goodput."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest

import planner.cluster
from planner.cluster import SimulatedCluster, SimulatedRequest
from planner.trace import TraceRequest
from protocol import costs
from protocol.costs import SLO_SHARE
from router.placement.interface import Refusal
from router.placement.predict import refusal
from tests.planner.planned import layout, profile

BLOCK = 16
SLO_TTFT_S, SLO_TPOT_S = 0.5, 0.02
SMALL = {"step_s": 3.3e-3, "row_s": 2e-4, "context_s": 1.4e-6, "chunk_s": 1.35e-3, "token_s": 4.5e-4}
SMALL |= {"attention_s": 5.4e-7, "chunk_tokens": 512, "kv_bytes": 8192, "itl_budget_s": 0.02}
"""A model of 29 M parameters on one core, with the default ITL budget."""
FEW, MANY = 8, 100
"""Tokens of an answer."""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the refused requests by the objective that they would miss."""
    counts: Counter[str] = Counter()

    def counting(*asked) -> Refusal | None:
        found = refusal(*asked)
        if found is not None:
            counts[str(found.missed)] += 1
        return found

    monkeypatch.setattr(planner.cluster, "slo_refusal", counting)
    return counts


def goodput(rate: float, output: int, count: int = 500) -> float:
    """Return requests per second within the SLO. Prompts share prefixes within 40 conversations."""
    rng, at, requests = random.Random(2), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        conversation, shared = rng.randrange(40), rng.choice([0, 4, 8, 16])
        own = min(max(int(rng.lognormvariate(5.0, 0.9)), 8), 1500)
        blocks = [conversation * 1000 + block for block in range(shared)]
        blocks += [(100 + number) * 1000 + block for block in range(own // BLOCK)]
        trace = TraceRequest(at, shared * BLOCK + own, output, blocks)
        requests.append(SimulatedRequest(trace, BLOCK))
    where = layout(1, 1, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S)
    SimulatedCluster(where, profile(500_000, **SMALL)).run(requests)
    good = [each for each in requests if each.ttft_s <= SLO_TTFT_S and each.tpot_s <= SLO_TPOT_S]
    return len(good) / at


@pytest.mark.parametrize("output", [FEW, MANY])
def test_later_prompts_are_no_reason_to_refuse(refused, output):
    """The ITL budget bounds their share of each step, even if the answer has few tokens to spread it over."""
    assert goodput(8.0, output) > 6.0
    assert refused["slo_tpot"] <= 2


@pytest.mark.parametrize(("output", "share"), [(FEW, 1.0), (MANY, SLO_SHARE)])
def test_overload_costs_no_goodput(output, share, monkeypatch):
    """This also holds if the SLO equals the step time that the workers' budget allows."""
    monkeypatch.setattr(costs, "SLO_SHARE", share)
    found = [goodput(rate, output) for rate in (12.0, 24.0, 48.0)]
    assert all(after >= 0.8 * best for after, best in zip(found, accumulate(found, max), strict=True))
