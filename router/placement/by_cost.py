"""The policy `cost`: the placement that costs all requests together the fewest seconds.

By the measured step costs it compares the whole request on one worker with splits between a prefill and a
decode worker. Candidates are a few of the least loaded workers and a few with the longest cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf
from typing import TypeVar

from costs.drafting import TRIAL_SHARE
from protocol.roles import Task
from router.placement.cluster import Cluster
from router.placement.interface import (
    Option,
    Placement,
    PolicyState,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)
from router.placement.predict import (
    DecodeCost,
    PrefillCost,
    best_holder,
    cached_on,
    decode_cost,
    handoff_seconds,
    miss,
    prefill_cost,
)
from router.placement.rules import Chosen, holders, is_overloaded

Cost = TypeVar("Cost", PrefillCost, DecodeCost)

CANDIDATES = 2
"""Number of candidates for a task: of the least loaded workers, and of those with the longest prefix."""
MARGIN = 0.03
"""[share of the best cost] Differences to ignore, since predictions are no more precise. Among equals the
worker whose latest placement is oldest wins; otherwise equal workers would get nothing.
"""


def place_by_cost(request: RequestFacts, cluster: Cluster) -> Placement | Refusal:
    holder = best_holder(request, cluster)
    prefills = [prefill_cost(request, worker, holder) for worker in candidates(request, cluster, "prefill")]
    decodes = [decode_cost(request, worker) for worker in candidates(request, cluster, "decode")]
    options = [whole(prefill_cost(request, cost.worker, holder), cost) for cost in decodes]
    if request.disaggregate or not decodes:
        both = [cost for cost in prefills if "decode" in cost.worker.tasks]
        options += [whole(cost, decode_cost(request, cost.worker)) for cost in both]
    if request.disaggregate:
        pairs = product(_cheapest(prefills), _cheapest(decodes))
        options += [split(request, prefill, decode) for prefill, decode in pairs]
    if not options:
        return Refusal("no worker is ready")
    wanted = [option for option in options if request.split in (None, "prefill" in option.workers)] or options
    in_time = [option for option in wanted if miss(request, cluster, option) is None]
    chosen = _choose(request, cluster, in_time or wanted)
    missing: Task | None = None
    if not decodes:
        missing = "decode"
    elif not prefills and request.disaggregate:
        missing = "prefill"
    return Placement(chosen.workers, missing, chosen.prefix, chosen.predicted, tuple(options))


def candidates(request: RequestFacts, cluster: Cluster, task: Task) -> list[WorkerSnapshot]:
    """Return the workers to compare: only the session's worker, unless that worker is overloaded."""
    if request.session:
        home = cluster.home(task, request.session, request.avoid)
        if home is not None and not is_overloaded(home, cluster):
            return [home]
    found = cluster.least_loaded(task, CANDIDATES, request.avoid)
    held = cluster.get(request.prefix_at)
    others = [held] if held is not None and held.purpose == task else []
    others += holders(request, cluster, task, CANDIDATES)
    return list({worker.worker_id: worker for worker in (*found, *others)}.values())


def cost(request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState) -> Chosen:
    """Return the worker where this task alone costs least; `place_by_cost` weighs both tasks together."""
    workers = candidates(request, cluster, task)
    if task == "decode":
        costs = _cheapest([decode_cost(request, worker) for worker in workers])
        return costs[0].worker if costs else None
    holder = best_holder(request, cluster)
    prefills = _cheapest([prefill_cost(request, worker, holder) for worker in workers])
    return prefills[0].worker if prefills else None


def whole(prefill: PrefillCost, decode: DecodeCost) -> Option:
    """Return the option of one worker for the whole request. Its rows include requests still in prefill."""
    predicted = Prediction(
        queue_s=prefill.queue_s + decode.row_s,
        fetch_s=prefill.fetch_s,
        prefill_s=prefill.prefill_s,
        room_s=decode.room_s,
        decode_s=decode.decode_s + decode.coming_s,
        delay_s=prefill.delay_s,
        slowdown_s=decode.slowdown_s,
    )
    return Option({"decode": prefill.worker.worker_id}, prefill.prefix, predicted)


def split(request: RequestFacts, prefill: PrefillCost, decode: DecodeCost) -> Option:
    """Return the option of computing the prompt on one worker and decoding on another."""
    predicted = Prediction(
        queue_s=prefill.queue_s,
        fetch_s=prefill.fetch_s,
        prefill_s=prefill.prefill_s,
        handoff_s=handoff_seconds(prefill, decode, request.num_tokens - cached_on(request, decode.worker)),
        room_s=decode.row_s + decode.room_s,
        decode_s=decode.decode_s + decode.pending_s,
        coming_s=decode.coming_s,
        delay_s=prefill.delay_s,
        slowdown_s=decode.slowdown_s,
    )
    workers: dict[Task, str] = {"prefill": prefill.worker.worker_id, "decode": decode.worker.worker_id}
    return Option(workers, prefill.prefix, predicted)


def _cheapest(costs: Sequence[Cost]) -> list[Cost]:
    return sorted(costs, key=lambda cost: (_sane(cost.total_s), cost.worker.last_placed))[:CANDIDATES]


def _choose(request: RequestFacts, cluster: Cluster, options: Sequence[Option]) -> Option:
    totals = [_total(cluster, option) for option in options]
    most = min(totals) * (1 + MARGIN)
    equals = [option for option, total in zip(options, totals, strict=True) if total <= most]
    return min(equals, key=lambda option: _turn(request, cluster, option))


def _total(cluster: Cluster, option: Option) -> float:
    """Return the predicted cost. It falls with the placements since an idle worker of the option got one:
    otherwise nothing would ever correct a measurement that keeps requests away.
    """
    if option.predicted is None:
        return inf
    idle = [worker.last_placed for worker in _workers(cluster, option) if worker.requests <= 0]
    unasked = cluster.last_placed - min(idle) if idle else 0
    return _sane(option.predicted.total_s) / (1 + TRIAL_SHARE * unasked / len(cluster))


def _turn(request: RequestFacts, cluster: Cluster, option: Option) -> tuple[int, int, int, tuple[str, ...]]:
    """Return the sort key among equals: longest cached prefix, fewest workers, oldest placement."""
    workers = _workers(cluster, option)
    asked = max(worker.last_placed for worker in workers)
    return -cached_on(request, workers[0]), len(workers), asked, tuple(option.workers.values())


def _workers(cluster: Cluster, option: Option) -> list[WorkerSnapshot]:
    return [worker for name in option.workers.values() if (worker := cluster.get(name)) is not None]


def _sane(seconds: float) -> float:
    """Return the seconds; infinity if they are negative or NaN."""
    return seconds if 0 <= seconds < inf else inf
