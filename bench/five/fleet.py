"""The experiment on a simulated fleet: the router's own policies before workers that a profile describes.

Techniques change the profile as a roofline has it, where every byte that a step reads and every row of it
has its time (Williams, Waterman and Patterson, "Roofline", 2009):

- disaggregation: prefill and decode workers, of which each request takes what costs less, in the best of
  three splits of the fleet; without, every worker does both;
- speculation: the better of drafting nothing and drafts of one length, with the profile's acceptance. A draft
  of K tokens takes K levels more, and makes a row of a step K + 1 rows;
- paged KV: without, a worker has no more sequences than its room holds of the longest;
- prefix sharing: without, no two prompts begin alike;
- quantization: linear layers have 4.125 bits a weight (4 and a scale of 16 for 128 of them), KV one byte a
  value. A step reads that much less, and what is saved is room for KV. Products take as long as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from operator import mul

import msgspec
import numpy as np

from bench.cost import cost_per_million
from bench.five.effects import Cell
from bench.five.search import NoRateError, highest
from bench.five.workloads import Workload
from planner.profile import Profile
from planner.scenarios import PlanOutcome, Scenario, Slo, Study
from planner.trace import TraceRequest
from protocol.errors import ConfigError

BLOCK_TOKENS = 128
"""Of a prompt, that are found again together."""
LINEAR_SHARE = 0.87
"""Of what a step reads of the weights: linear layers without embedding and head, as of Llama 3.1 8B 6.98e9 of
8.03e9 parameters."""
INT4_SHARE = 4.125 / 16
DRAFTS = (0, 1, 2, 3)
"""Tokens that a draft may have."""
MAX_NUM_SEQS = 256

FLEET_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("chat", 2048, 512, 256, 4.0, 0.5),
        Workload("long-prompts", 0, 8192, 128, 1.0, 0.25),
        Workload("long-answers", 0, 256, 1024, 2.0, 0.25),
    )
}
"""Rates are for each worker."""


class Fleet(msgspec.Struct, frozen=True):
    """Requests come for `seconds` in a trial; a rate is kept if `attainment` of them are within the SLO."""

    profile: Profile
    workers: int
    max_model_len: int
    slo: Slo
    attainment: float
    seconds: float
    probes: int


class SimulatedOutcome(msgspec.Struct, frozen=True):
    """Of one cell with one seed. `goodput` [requests/s] is 0 if no rate was kept; `layout` and `drafted` were
    the best for it. Latencies are medians at the light rate, in seconds.
    """

    workload: str
    cell: list[str]
    repeat: int
    goodput: float
    layout: str
    drafted: int
    ttft_s: float
    tpot_s: float

    def cost(self, fleet: Fleet, price: float) -> float:
        """Of a million output tokens."""
        tokens_per_s = self.goodput * FLEET_WORKLOADS[self.workload].output
        return cost_per_million(price, fleet.workers, tokens_per_s)


class Choice(msgspec.Struct, frozen=True):
    """One way to run a cell."""

    scenario: Scenario
    drafted: int
    profile: Profile


def choices_of(fleet: Fleet, cell: Cell) -> list[Choice]:
    """All that a cell may take. Raises ConfigError for a profile that lacks what a technique needs."""
    profile = fleet.profile
    if "quantization" in cell:
        profile = quantized(profile)
    fitting = (
        MAX_NUM_SEQS if "paging" in cell else min(MAX_NUM_SEQS, profile.kv_tokens // fleet.max_model_len)
    )
    if fitting < 1:
        raise ConfigError(
            f"--max-model-len: a worker of {profile.name} has room for {profile.kv_tokens} tokens, "
            f"got {fleet.max_model_len}"
        )
    profile = msgspec.structs.replace(profile, max_num_seqs=fitting)
    workers = fleet.workers
    scenarios = [Scenario("colocated", 0, workers)]
    if "disaggregation" in cell:
        splits = sorted({max(1, workers * quarters // 4) for quarters in (1, 2, 3)})
        scenarios = [Scenario("conditional", prefill, workers - prefill) for prefill in splits]
    drafts = DRAFTS if "speculation" in cell else (0,)
    return [
        Choice(scenario, drafted, drafting(profile, drafted)) for scenario in scenarios for drafted in drafts
    ]


def quantized(profile: Profile) -> Profile:
    """With int4 weights and KV in one byte a value."""
    costs = profile.costs
    if not costs.kv_bytes or not costs.context_s:
        raise ConfigError(
            f"--profile: {profile.name}: quantization needs costs.kv_bytes and costs.context_s above 0"
        )
    bytes_per_s = costs.kv_bytes / costs.context_s
    saved_s = costs.step_s * LINEAR_SHARE * (1 - INT4_SHARE)
    room = profile.kv_tokens * costs.kv_bytes + saved_s * bytes_per_s
    kv_bytes = costs.kv_bytes // 2
    changed = msgspec.structs.replace(
        costs, step_s=costs.step_s - saved_s, context_s=costs.context_s / 2, kv_bytes=kv_bytes
    )
    return msgspec.structs.replace(profile, costs=changed, kv_tokens=int(room / kv_bytes))


def drafting(profile: Profile, drafted: int) -> Profile:
    """With drafts of so many tokens in every step. Raises ConfigError where the profile tells of too few."""
    if drafted == 0:
        return profile
    known = profile.speculation
    if known is None or not known.methods or len(known.methods[0].acceptance) < drafted:
        raise ConfigError(
            f"--profile: {profile.name} does not tell the acceptance of {drafted} drafted tokens"
        )
    method, costs = known.methods[0], profile.costs
    accepted = sum(list(accumulate(method.acceptance, mul))[:drafted])
    changed = msgspec.structs.replace(
        costs,
        step_s=costs.step_s + method.start_s + drafted * method.level_s,
        row_s=costs.row_s * (1 + drafted),
        tokens_per_row=1 + accepted,
    )
    return msgspec.structs.replace(profile, costs=changed)


def load(workload: Workload, rate: float, seconds: float, is_shared: bool, seed: int) -> list[TraceRequest]:
    """As many as come in `seconds` on average, at times of a Poisson process with that number of arrivals."""
    number = max(round(rate * seconds), 16)
    arrivals = np.sort(np.random.default_rng(seed).uniform(0, number / rate, number)).tolist()
    fresh, requests = count(workload.shared), []
    for arrival in arrivals:
        shared = workload.shared // BLOCK_TOKENS
        blocks = list(range(shared)) if is_shared else [next(fresh) for _ in range(shared)]
        blocks += [next(fresh) for _ in range(-(-workload.own // BLOCK_TOKENS))]
        requests.append(TraceRequest(arrival, workload.prompt, workload.output, blocks))
    return requests


def simulate_cell(fleet: Fleet, workload: Workload, cell: Cell, repeat: int) -> SimulatedOutcome:
    """A rate is kept if one of the cell's choices keeps it; the last one that did is tried first."""
    choices = choices_of(fleet, cell)

    def outcomes(rate: float) -> Iterator[tuple[Choice, PlanOutcome]]:
        requests = load(workload, rate, fleet.seconds, "sharing" in cell, repeat)
        for choice in list(choices):
            study = Study(choice.profile, requests, BLOCK_TOKENS, fleet.slo)
            yield choice, study.outcome(choice.scenario)

    def trial(rate: float) -> tuple[bool, tuple[Choice, float]]:
        best = choices[0], 0.0
        for choice, outcome in outcomes(rate):
            best = max(best, (choice, outcome.attainment), key=lambda each: each[1])
            if outcome.attainment >= fleet.attainment:
                choices.remove(choice)
                choices.insert(0, choice)
                return True, best
        return False, best

    try:
        rate, (chosen, attainment) = highest(workload.first_rate * fleet.workers, fleet.probes, trial)
    except NoRateError:
        rate, (chosen, attainment) = 0.0, (choices[0], 0.0)
    light = min(
        (outcome for _, outcome in outcomes(workload.light_rate * fleet.workers)),
        key=lambda outcome: outcome.ttft.p50 + workload.output * outcome.tpot.p50,
    )
    return SimulatedOutcome(
        workload=workload.name,
        cell=sorted(cell),
        repeat=repeat,
        goodput=rate * attainment,
        layout=_layout(chosen.scenario),
        drafted=chosen.drafted,
        ttft_s=light.ttft.p50,
        tpot_s=light.tpot.p50,
    )


def _layout(scenario: Scenario) -> str:
    return f"{scenario.prefill}:{scenario.decode}" if scenario.prefill else str(scenario.decode)
