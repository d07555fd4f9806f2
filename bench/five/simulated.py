"""The same experiment on a simulated fleet: the router's placement and the engine's scheduler serve the loads
on the planner's virtual clock.

The techniques change the profile of the workers, whose decoding is bound by reading memory, or the requests:

- Speculation drafts as many tokens in each step as the profile's method has acceptances. A step takes the
  time of a level for each, and that of a row for each drafted token, and brings a request tau tokens.
- Quantization rounds weights and KV to one byte a value: a step reads half of the bytes, and the products of
  a prompt take half of the time, as in FP8 on a GPU that computes twice as many products in it.
- Without paged KV, a sequence takes room for the longest text.
- Without prefix sharing, no two prompts begin with the same tokens.
- With disaggregation, the best number of prefill workers is taken, as `tandem plan` recommends it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, chain
from math import ceil
from operator import mul

from msgspec.structs import replace

from bench.five.factors import TechniqueSet
from bench.five.measure import FLEET, CellOutcome, ExperimentSetting, Trial, outcome_of
from bench.five.workloads import LEAST_REQUESTS, Traffic
from planner.profile import Profile, read_profile
from planner.scenarios import PlanOutcome, Scenario, Slo, Study, best
from planner.trace import TRACE_BLOCK_TOKENS, TraceRequest
from protocol.costs import StepCosts
from protocol.errors import ConfigError
from protocol.speculation import MethodState

MOST_SEQUENCES = 256
"""Most sequences in a step, more than the objective on the time per token lets a worker decode."""
WHOLE = (Scenario("colocated", 0, FLEET),)
SPLIT = tuple(Scenario("disaggregated", prefill, FLEET - prefill) for prefill in (2, 1, 3))


class SimulatedFleet:
    """A fleet that gets loads of one workload. Its arrivals are drawn with `seed`."""

    def __init__(self, setting: ExperimentSetting, workload: Traffic, cell: TechniqueSet, seed: int) -> None:
        objective = setting.objective
        self._profile = with_techniques(read_profile(setting.model), cell, setting.max_model_len)
        self._layouts = list(SPLIT if "disaggregation" in cell else WHOLE)
        self._objective, self._slo = objective, Slo(objective.ttft_s, objective.tpot_s)
        self._workload, self._seconds, self._seed = workload, setting.seconds, seed
        self._num_shared = workload.shared // TRACE_BLOCK_TOKENS if "sharing" in cell else 0
        self.trials: list[Trial] = []

    def search(self, rate: float) -> tuple[bool, Trial]:
        trial = self.measure(rate)
        self.trials.append(trial)
        return self._passes(trial.attainment), trial

    def measure(self, rate: float) -> Trial:
        """Simulate one load in each layout, up to one that meets the objective, and take the best."""
        study = Study(self._profile, list(self._requests(rate)), TRACE_BLOCK_TOKENS, self._slo)
        outcomes: list[PlanOutcome] = []
        for layout in self._layouts:
            outcomes.append(study.outcome(layout))
            if self._passes(outcomes[-1].attainment):
                break
        found = best(outcomes)
        # It is probably the best for other rates, too, so it is tried first.
        self._layouts.sort(key=lambda layout: layout != found.scenario)
        goodput = found.attainment * rate
        return Trial(rate, goodput, found.attainment, found.ttft.p50, found.tpot.p50, found.refused)

    def _passes(self, attainment: float) -> bool:
        return attainment >= self._objective.attainment

    def _requests(self, rate: float) -> Iterator[TraceRequest]:
        """Yield the requests that arrive at random (Poisson), the same at each call but for their pace."""
        draw, now, shared = random.Random(self._seed), 0.0, self._num_shared
        length, answer = self._workload.prompt, self._workload.output
        own = ceil(length / TRACE_BLOCK_TOKENS) - shared
        for number in range(max(round(rate * self._seconds), LEAST_REQUESTS)):
            now += draw.expovariate(1.0) / rate
            first = shared + number * own
            yield TraceRequest(now, length, answer, [*range(shared), *range(first, first + own)])


def with_techniques(profile: Profile, cell: TechniqueSet, longest: int) -> Profile:
    """Return the profile of a worker with the cell's techniques. Raises `ConfigError` if it has no drafts, or
    no time to read KV.
    """
    costs, kv_tokens = profile.costs, profile.kv_tokens
    if "quantization" in cell:
        if costs.context_s <= 0:
            raise ConfigError(
                f"--simulate: the profile {profile.name} has no time to read KV: costs.context_s"
            )
        half_of_weights = round(costs.step_s / costs.context_s)  # in tokens of rounded KV
        kv_tokens = 2 * kv_tokens + half_of_weights
        halved = {name: getattr(costs, name) / 2 for name in ("step_s", "context_s", "token_s")}
        costs = replace(costs, kv_bytes=costs.kv_bytes // 2, **halved)
    if "speculation" in cell:
        if profile.speculation is None or not profile.speculation.methods:
            raise ConfigError(f"--simulate: the profile {profile.name} has no drafts")
        costs = drafting(costs, profile.speculation.methods[0])
    least = 0 if "paging" in cell else longest
    return replace(profile, costs=costs, kv_tokens=kv_tokens, max_num_seqs=MOST_SEQUENCES, least_tokens=least)


def drafting(costs: StepCosts, method: MethodState) -> StepCosts:
    """Return the costs of steps that verify a draft of each request."""
    drafted = len(method.acceptance)
    return replace(
        costs,
        step_s=costs.step_s + drafted * method.level_s,
        row_s=costs.row_s * (1 + drafted),
        tokens_per_row=sum(chain((1.0,), accumulate(method.acceptance, mul))),
    )


def simulate_cell(
    setting: ExperimentSetting, workload: Traffic, cell: TechniqueSet, repeat: int, near: float | None
) -> CellOutcome:
    """Simulate one cell."""
    fleet = SimulatedFleet(setting, workload, cell, seed=repeat)
    return outcome_of(fleet, workload, cell, repeat, setting.probes, near)
