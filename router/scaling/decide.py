"""The decision whether a role needs more or fewer workers: a pure function, also used in a simulator.

For each role the decision finds the least number of workers for the demand of the last minutes: few prompts
wait longer than the SLO allows (Erlang's C formula, with Allen and Cunneen's correction for the spread of
prompts), steps keep the time per token, and rows and KV keep some headroom. Workers are added at once, also
when prompts queue up or answers miss their SLO unforeseen. Workers are removed after fewer would have
sufficed for a while. If no node has room, a role with a spare worker gives it to another role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, sqrt
from typing import NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.roles import WorkerRange
from router.placement.interface import WorkerSnapshot
from router.workers.assignment import RoleDemand
from router.workers.registry import Worker

INTERVAL_S = 5.0
"""[seconds] The time between two decisions."""
WINDOW_S = 900.0
"""[seconds] Window of mean demand: demand changes over hours, and fewer requests scatter more."""
SHORT_S = 30.0
"""[seconds] Window of the mean rows, context and KV."""
JUDGED_S = 300.0
"""[seconds] Window of answers that met or missed the SLO; it begins at the last change at the earliest."""
LEAST_MISSED = 2
LONG = 1.5
"""Standard deviations above the mean length up to which prompts should be in time."""
ATTAINMENT = 0.95
"""Share of answers that should meet the SLO. A worker is added at half of the allowed misses."""
LATE_CHANCE = 0.01
"""[share] Prompts that may wait too long by the formula, which leaves misses for other causes."""
MARGIN = 1.1
"""Factor by which the capacity must exceed the load before a worker is removed."""
TPOT_SHARE = 0.9
ROWS_SHARE = 0.9
KV_SHARE = 0.85
BUSY_SHARE = 0.8
"""Largest mean shares to use: of the SLO's time per token, of rows, of KV, and of a worker's time."""
QUEUE_S = 5.0
"""[seconds] Longest wait of prompts if no SLO limits it."""


class ScalingPolicy(NamedTuple):
    """`ranges`: least and most workers of each scaled role. Fewer must suffice for `down_after_s` before a
    worker leaves; a change for missed SLOs waits `settle_s` for the effect of the last change.
    """

    ranges: Mapping[str, WorkerRange]
    down_after_s: float = 300.0
    settle_s: float = 30.0


class Sample(NamedTuple):
    at: float
    loads: Mapping[str, RoleLoad]


class WorkerNeed(NamedTuple):
    """The number of workers that a role needed at time `at`, with the margin."""

    at: float
    workers: int


@dataclass(frozen=True, slots=True)
class ScalerState:
    """The latest samples and the numbers of workers needed, the oldest first, and when roles last changed."""

    samples: tuple[Sample, ...] = ()
    needs: Mapping[str, tuple[WorkerNeed, ...]] = field(default_factory=dict)
    changed_at: Mapping[str, float] = field(default_factory=dict)


class ScalingDecision(NamedTuple):
    """The wanted workers of each role, and why. `changes_role`: the roles that a worker leaves and gets."""

    targets: Mapping[str, int]
    reasons: Mapping[str, str]
    changes_role: tuple[str, str] | None = None


class OfferedLoad(NamedTuple):
    """The load on a whole role. `prompts`: mean number of workers that computing prompts keeps busy."""

    prompts: float
    prompt_s: float
    spread: float
    rows: float
    context: float
    kv_usage: float

    def times(self, factor: float) -> OfferedLoad:
        return self._replace(
            prompts=self.prompts * factor,
            rows=self.rows * factor,
            context=self.context * factor,
            kv_usage=self.kv_usage * factor,
        )


def decide(
    facts: ScalingFacts, policy: ScalingPolicy, state: ScalerState
) -> tuple[ScalingDecision | None, ScalerState]:
    """Return the change to make, if any, and the state for the next call."""
    kept = (each for each in state.samples if each.at >= facts.now - WINDOW_S)
    samples = (*kept, Sample(facts.now, facts.loads))
    targets, reasons, needs = {}, {}, dict(state.needs)
    spare: dict[str, bool] = {}
    for role, bounds in policy.ranges.items():
        load, have = _offered_load(samples, role, facts.now), facts.loads[role].have
        fits_now, why = needed(load, facts, role, bounds)
        fits_later, _ = needed(load.times(MARGIN), facts, role, bounds)
        wanted = fits_now
        if _is_settled(state, role, facts, policy):
            since = max(facts.now - JUDGED_S, state.changed_at.get(role, -inf))
            pressed, pressure = _pressed(samples, role, facts, since)
            if pressed > wanted:
                wanted, why = min(pressed, bounds.most), pressure
        known = (*needs.get(role, ()), WorkerNeed(facts.now, max(wanted, fits_later)))
        needs[role] = tuple(each for each in known if each.at >= facts.now - policy.down_after_s)
        spare[role] = max(wanted, fits_later) < have
        if wanted <= have:
            enough = max(each.workers for each in needs[role])
            is_known = facts.now - needs[role][0].at >= policy.down_after_s - INTERVAL_S
            wanted, why = min(have, enough) if is_known else have, f"{enough} suffice"
        if wanted != have:
            targets[role], reasons[role] = wanted, why
    state = replace(state, samples=samples, needs=needs)
    decision = _within_room(ScalingDecision(targets, reasons), facts, policy, spare)
    if decision is None:
        return None, state
    roles = decision.changes_role or tuple(decision.targets)
    return decision, replace(state, changed_at={**state.changed_at, **dict.fromkeys(roles, facts.now)})


def needed(load: OfferedLoad, facts: ScalingFacts, role: str, bounds: WorkerRange) -> tuple[int, str]:
    """Return the least number of workers that suffices, within the bounds, and why one fewer does not."""
    why = "the least"
    for workers in range(bounds.least, bounds.most):
        lack = _lacks(load, workers, facts, facts.loads[role])
        if not lack:
            return workers, why
        why = lack
    return bounds.most, why


def _lacks(load: OfferedLoad, workers: int, facts: ScalingFacts, seen: RoleLoad) -> str:
    """Return why `workers` do not suffice; "" if they do."""
    costs, busy = seen.costs, load.prompts / workers
    if busy > (BUSY_SHARE if facts.slo_ttft_s == inf else 0.95):
        return f"{workers} would compute prompts for {busy:.0%} of their time"
    if load.prompts > 0 and facts.slo_ttft_s < inf:
        allowed_s = max(facts.slo_ttft_s - load.prompt_s * (1 + LONG * sqrt(load.spread)), 0.0)
        late = late_share(workers, load.prompts, load.prompt_s * (1 + load.spread) / 2, allowed_s)
        if late > LATE_CHANCE:
            return f"at {workers} {late:.0%} of prompts would wait too long"
    rows = (load.rows + sqrt(load.rows)) / workers
    if rows > ROWS_SHARE * seen.max_rows:
        return f"{workers} would have {rows:.0f} rows each"
    context = load.context / load.rows * rows if load.rows > 0 else 0.0
    tpot_s = costs.decode_s(rows, context) / max(costs.tokens_per_row, 1.0) / (1 - busy) if rows else 0.0
    if tpot_s > TPOT_SHARE * facts.slo_tpot_s:
        return f"at {workers} a token would take {tpot_s * 1e3:.1f} ms"
    if load.kv_usage / workers > KV_SHARE:
        return f"{workers} would use {load.kv_usage / workers:.0%} of their KV"
    return ""


def late_share(workers: int, busy: float, service_s: float, allowed_s: float) -> float:
    """Return the chance of a wait over `allowed_s` if `busy` of the `workers` are busy: Erlang C."""
    if busy >= workers:
        return 1.0
    blocked = 1.0
    for number in range(1, workers + 1):
        blocked = busy * blocked / (number + busy * blocked)
    waits = blocked / (1 - busy / workers * (1 - blocked))
    return waits * exp(-(workers - busy) * allowed_s / max(service_s, 1e-9))


def _offered_load(samples: tuple[Sample, ...], role: str, now: float) -> OfferedLoad:
    long, long_s = _passed(samples, role, now - WINDOW_S)
    rate = long.prompts / long_s if long_s > 0 else 0.0
    mean_s = long.prompt_s / long.prompts if long.prompts else 0.0
    square = long.prompt_s2 / long.prompts if long.prompts else 0.0
    spread = max(square / mean_s**2 - 1, 0.0) if mean_s > 0 else 0.0
    latest = [sample.loads[role] for sample in samples if sample.at > now - SHORT_S]
    count = len(latest)
    return OfferedLoad(
        prompts=rate * mean_s,
        prompt_s=mean_s,
        spread=spread,
        rows=sum(load.rows for load in latest) / count,
        context=sum(load.context for load in latest) / count,
        kv_usage=sum(load.kv_usage for load in latest) / count,
    )


def _passed(samples: tuple[Sample, ...], role: str, since: float) -> tuple[RoleDemand, float]:
    """Return the demand counted since time `since`, and the seconds in which it was counted."""
    first = next(sample for sample in samples if sample.at >= since)
    return samples[-1].loads[role].demand - first.loads[role].demand, samples[-1].at - first.at


def _is_settled(state: ScalerState, role: str, facts: ScalingFacts, policy: ScalingPolicy) -> bool:
    """Return whether the role's last change has taken effect."""
    return not facts.loads[role].coming and facts.now - state.changed_at.get(role, -inf) >= policy.settle_s


def _pressed(samples: tuple[Sample, ...], role: str, facts: ScalingFacts, since: float) -> tuple[int, str]:
    """Return the workers needed for unforeseen load, queued prompts or missed SLOs, and why; 0 for none."""
    load = facts.loads[role]
    allowed_s = facts.slo_ttft_s / 2 if facts.slo_ttft_s < inf else QUEUE_S
    if load.backlog_s > load.workers * allowed_s:
        wanted = min(ceil(load.backlog_s / allowed_s), load.have + ceil(load.workers / 4))
        return wanted, f"prompts of {load.backlog_s:.1f} s wait for {load.workers}"
    recent, _ = _passed(samples, role, since)
    allowed = (1 - ATTAINMENT) / 2 * recent.judged
    if recent.missed >= LEAST_MISSED and recent.missed > allowed + sqrt(allowed):
        return load.have + 1, f"{recent.missed} of {recent.judged} missed their SLO"
    return 0, ""


def _within_room(
    decision: ScalingDecision, facts: ScalingFacts, policy: ScalingPolicy, spare: Mapping[str, bool]
) -> ScalingDecision | None:
    """Limit the decision to the nodes' room. Without room, another role's spare worker changes its role."""
    targets, reasons = dict(decision.targets), dict(decision.reasons)
    taken = 0
    for role, wanted in decision.targets.items():
        have = facts.loads[role].have
        gets = min(wanted - have, max(facts.room.get(role, 0) - taken, 0))
        taken += max(gets, 0)
        targets[role] = have + gets
        if gets:
            continue
        del targets[role]
        for other, bounds in policy.ranges.items():
            can_give = spare[other] and facts.loads[other].workers > bounds.least
            if other != role and can_give and not {other, role} & {"draft"}:
                reason = {role: f"{reasons[role]}; no node takes more, and {other} can spare one"}
                return ScalingDecision({}, reason, (other, role))
    return ScalingDecision(targets, {role: reasons[role] for role in targets}) if targets else None


class RoleLoad(NamedTuple):
    """The current load of the workers of one role: `workers` serve and `coming` more are starting.

    `rows` decode there, at most `max_rows` each, with `context` tokens in all. `kv_usage`: pools of KV in
    use. `backlog_s`: seconds of prompts that wait for others.
    """

    workers: int
    coming: int = 0
    rows: float = 0.0
    context: float = 0.0
    kv_usage: float = 0.0
    backlog_s: float = 0.0
    max_rows: int = 64
    costs: StepCosts = UNKNOWN_COSTS
    demand: RoleDemand = RoleDemand()

    @property
    def have(self) -> int:
        return self.workers + self.coming


class ScalingFacts(NamedTuple):
    """The facts at `now` [s]. `room`: further workers of each role for which the nodes have room."""

    now: float
    loads: Mapping[str, RoleLoad]
    room: Mapping[str, int]
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf


def role_load(workers: Sequence[Worker], coming: int, demand: RoleDemand, max_rows: int) -> RoleLoad:
    """Return the load of workers of one role that accept requests."""
    loads = [worker.load for worker in workers]
    return RoleLoad(
        workers=len(loads),
        coming=coming,
        rows=sum(load.rows for load in loads),
        context=sum(load.context_tokens for load in loads),
        kv_usage=sum(load.kv_usage for load in loads),
        backlog_s=sum(map(_waiting_s, loads)),
        max_rows=max_rows,
        costs=loads[0].costs if loads else UNKNOWN_COSTS,
        demand=demand + RoleDemand(),
    )


def _waiting_s(load: WorkerSnapshot) -> float:
    """Return the seconds to compute all prompts that wait except the first."""
    share = 1 - 1 / load.prompts if load.prompts > 1 else 0.0
    return share * load.costs.chunks_s(load.prefill_tokens, 0, load.costs.chunk_tokens)
