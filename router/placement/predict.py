"""Predictions, from measured step costs, of a placement's cost and of whether it meets its SLO."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from protocol.costs import StepCosts, itl_bound
from router.placement.cluster import Cluster
from router.placement.interface import (
    LinkSpeed,
    Missed,
    Option,
    Placement,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)

_NO_LINK = LinkSpeed()
LEAST_CHUNK = 16
"""[tokens] Least prompt tokens that a step computes, however slow: one block."""


class PrefillCost(NamedTuple):
    """The cost of computing the prompt on a worker, after fetching leading blocks from `prefix` if set."""

    worker: WorkerSnapshot
    cached: int
    prefix: str | None
    queue_s: float
    fetch_s: float
    prefill_s: float
    delay_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s + self.delay_s


class DecodeCost(NamedTuple):
    """The cost of decoding on a worker. `row_s` is the wait for a free row, `room_s` for KV blocks,
    `pending_s` for prompts that are queued already, `coming_s` for those that arrive meanwhile.
    """

    worker: WorkerSnapshot
    row_s: float
    room_s: float
    decode_s: float
    coming_s: float
    slowdown_s: float
    pending_s: float

    @property
    def total_s(self) -> float:
        return self.row_s + self.room_s + self.decode_s + self.coming_s + self.slowdown_s + self.pending_s


def prefill_cost(request: RequestFacts, worker: WorkerSnapshot, holder: WorkerSnapshot | None) -> PrefillCost:
    """Predict the prefill; it fetches the prefix from `holder` if fetching is faster than computing."""
    cached = cached_on(request, worker)
    own_s, prefix, fetch_s, begin = compute_s(worker, request.num_tokens - cached, cached), None, 0.0, cached
    if holder is not None and holder.worker_id != worker.worker_id:
        there = cached_on(request, holder)
        if there > cached:
            rest_s = compute_s(worker, request.num_tokens - there, there)
            needed_s = fetch_seconds(worker, holder, there - cached)
            if needed_s + rest_s < own_s:
                own_s, prefix, fetch_s, begin = rest_s, holder.worker_id, needed_s, there
    ahead = _waiting(worker)
    queue_s = compute_s(worker, ahead, 0) * worker.prompts if ahead > 0 else 0.0
    chunk = chunk_tokens(worker, request.num_tokens)
    delay_s = worker.rows * worker.costs_now.chunks_s(request.num_tokens - begin, begin, chunk)
    if worker.requests <= 0:
        delay_s += slowed_s(worker, own_s)
    return PrefillCost(worker, begin, prefix, queue_s, fetch_s, own_s, delay_s)


def decode_cost(request: RequestFacts, worker: WorkerSnapshot) -> DecodeCost:
    costs, rows, context = costs_while_decoding(request, worker), worker.rows, worker.context_tokens
    output = max(request.output_tokens - 1, 0.0)
    before_s = costs.decode_s(rows, context)
    after_s = costs.decode_s(rows + 1, context + request.num_tokens + output / 2)
    steps = _decode_steps(request, worker)
    most_s = steps * _most_prefill_s(request, worker)
    pending_s = min(_pending_s(worker), most_s)
    row_s = _row_share(worker) * steps * after_s
    room_s = _room_share(worker, request.num_tokens + output) * steps * after_s
    slowdown_s = rows * steps * (after_s - before_s) + slowed_s(worker, steps * after_s)
    coming_s = _coming_s(worker) * output / max(request.mean_output_tokens, output, 1.0)
    return DecodeCost(worker, row_s, room_s, steps * after_s, min(coming_s, most_s), slowdown_s, pending_s)


def costs_while_decoding(request: RequestFacts, worker: WorkerSnapshot) -> StepCosts:
    """Return the worker's step costs while it decodes the request. A neighbour that decodes uses its cores
    all the time, one that only computes prompts as long as these take: far shorter than an answer.
    """
    if not worker.costs.borrows:
        return worker.costs
    step_s = worker.costs_now.decode_s(worker.rows + 1, worker.context_tokens)
    answer_s = _decode_steps(request, worker) * step_s
    busy = sum(_busy_share(other, answer_s) for other in worker.neighbours)
    return worker.costs.on(worker.spread(busy))


def _decode_steps(request: RequestFacts, worker: WorkerSnapshot) -> float:
    return max(request.output_tokens - 1, 0.0) / max(worker.costs.tokens_per_row, 1.0)


def _busy_share(worker: WorkerSnapshot, seconds: float) -> float:
    """Return the share of the next `seconds` in which the worker computes."""
    if worker.rows > 0:
        return 1.0
    prompts_s = _pending_s(worker) + _coming_s(worker)
    return min(prompts_s / seconds, 1.0) if seconds > 0 else float(worker.requests > 0)


def _pending_s(worker: WorkerSnapshot) -> float:
    """Return the seconds that the worker still computes the prompts that wait."""
    costs = worker.costs_now
    return costs.chunks_s(_waiting(worker), 0, costs.chunk_tokens) * worker.prompts


def _coming_s(worker: WorkerSnapshot) -> float:
    """Return the seconds that the worker computes new prompts during the mean answer. About as many prompts
    arrive as requests end, so this is the time for the prompts of the live requests that it computed.
    """
    if worker.computed_prompts <= 0:
        return 0.0
    mean = worker.computed_tokens / worker.computed_prompts
    return worker.computed_prompts * worker.costs_now.chunks_s(mean, 0, chunk_tokens(worker, mean))


def _most_prefill_s(request: RequestFacts, worker: WorkerSnapshot) -> float:
    """Return the most seconds that prompts add to each of the worker's decode steps, by the ITL budget."""
    costs = worker.costs_now
    if costs.itl_budget_s <= 0:
        return inf
    bound_s = itl_bound(costs.itl_budget_s, request.slo_tpot_s)
    rows, context = worker.rows + 1, worker.context_tokens + request.num_tokens
    least_s = costs.chunks_s(LEAST_CHUNK, 0, LEAST_CHUNK)
    return max(costs.chunk_seconds(rows, context, bound_s), least_s)


def slowed_s(worker: WorkerSnapshot, seconds: float) -> float:
    """Return the seconds that other requests of the host lose if the worker uses its cores for `seconds`."""
    if worker.rows > 0:
        return 0.0
    return sum(_slowed_share(other, worker) * seconds for other in worker.busy_neighbours)


def _slowed_share(worker: WorkerSnapshot, busy: WorkerSnapshot) -> float:
    """Return how many seconds the worker's requests lose a second while its neighbour `busy` computes."""
    others = sum(other.worker_id != busy.worker_id for other in worker.busy_neighbours)
    before, after = worker.costs.on(worker.spread(others)), worker.costs.on(worker.spread(others + 1))
    decode_s = before.decode_s(worker.rows, worker.context_tokens)
    longer_s = after.decode_s(worker.rows, worker.context_tokens)
    lost = worker.rows * (1 - decode_s / longer_s) if longer_s > 0 else 0.0
    if worker.prompts > 0 and after.token_s > 0:
        lost += worker.prompts * (1 - before.token_s / after.token_s)
    return max(lost, 0.0)


def handoff_seconds(prefill: PrefillCost, decode: DecodeCost, num_tokens: int) -> float:
    """Return the time from the first token until all blocks are at the decode worker.

    Blocks are sent while later chunks are computed. After the prefill the link still has to send the last
    chunk, or all blocks that it was too slow for.
    """
    costs = prefill.worker.costs
    link = prefill.worker.links.get(decode.worker.worker_id, _NO_LINK)
    moved = costs.kept_tokens(num_tokens)
    whole_s = link.seconds(moved * costs.kv_bytes)
    last_s = link.seconds(min(moved, costs.chunk_tokens) * costs.kv_bytes)
    return max(last_s, whole_s - prefill.prefill_s)


def compute_s(worker: WorkerSnapshot, tokens: float, before: float) -> float:
    """Return the time to compute `tokens` (at least one) after `before` tokens, in steps that also decode."""
    chunk = chunk_tokens(worker, before + max(tokens, 1))
    return worker.costs_now.prompt_s(tokens, before, chunk, worker.rows, worker.context_tokens)


def chunk_tokens(worker: WorkerSnapshot, context: float) -> int:
    """Return the most prompt tokens in one step: fewer if the worker also decodes."""
    costs, rows = worker.costs_now, worker.rows
    if rows <= 0 or costs.itl_budget_s <= 0:
        return max(costs.chunk_tokens, 1)
    seconds = costs.chunk_seconds(rows, worker.context_tokens, costs.itl_budget_s)
    return min(max(costs.chunk_tokens, 1), max(costs.fitting_tokens(seconds, context / 2), LEAST_CHUNK))


def fetch_seconds(worker: WorkerSnapshot, holder: WorkerSnapshot, tokens: int) -> float:
    """Return the time to fetch the KV of `tokens`. Both workers read messages only between steps."""
    link = holder.links.get(worker.worker_id, _NO_LINK)
    wait_s = sum(each.costs_now.decode_s(each.rows, each.context_tokens) for each in (worker, holder))
    return wait_s + link.seconds(holder.costs.kept_tokens(tokens) * holder.costs.kv_bytes)


def cached_on(request: RequestFacts, worker: WorkerSnapshot) -> int:
    if worker.worker_id == request.prefix_at:
        return max(request.num_tokens, 0)
    return max(min(request.cached_tokens.get(worker.worker_id, 0), request.num_tokens), 0)


def best_holder(request: RequestFacts, cluster: Cluster) -> WorkerSnapshot | None:
    """Return the worker that holds most of the prompt's KV."""
    held = cluster.get(request.prefix_at)
    if held is not None:
        return held
    there = [worker for name in request.cached_tokens if (worker := cluster.get(name)) is not None]
    return max(there, key=lambda worker: request.cached_tokens[worker.worker_id], default=None)


def _waiting(worker: WorkerSnapshot) -> float:
    """Return the mean number of uncached tokens of the prompts that wait."""
    return worker.prefill_tokens / worker.prompts if worker.prompts > 0 else 0.0


def _row_share(worker: WorkerSnapshot) -> float:
    """Return the share of the worker's rows that must end before the request can decode there."""
    return max(worker.rows + 1 - worker.max_rows, 0.0) / worker.max_rows if worker.max_rows > 0 else 0.0


def _room_share(worker: WorkerSnapshot, tokens: float) -> float:
    """Return the share of the worker's context tokens that must be freed for `tokens` more."""
    if worker.kv_tokens <= 0 or worker.context_tokens <= 0:
        return 0.0
    held = worker.costs.kept_tokens(worker.context_tokens, worker.rows)
    used, added = max(worker.kv_usage * worker.kv_tokens, held), worker.costs.kept_tokens(tokens)
    return min(max(used + added - worker.kv_tokens, 0.0) / worker.context_tokens, 1.0)


MAX_RETRY_S = 3600.0


class PredictedMiss(NamedTuple):
    """A predicted miss. `worker` is idle in `idle_in_s` seconds; after that the request takes `alone_s`."""

    missed: Missed
    worker: WorkerSnapshot
    expected_s: float
    asked_s: float
    alone_s: float
    idle_in_s: float

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait: the expected time is assumed to fall linearly until the worker is idle."""
        spread_s = self.expected_s - self.alone_s
        share = min((self.expected_s - self.asked_s) / spread_s, 1.0) if spread_s > 0 else 1.0
        seconds = share * self.idle_in_s
        return min(seconds, MAX_RETRY_S) if seconds >= 0 else 1.0


def refusal(request: RequestFacts, cluster: Cluster, placement: Placement) -> Refusal | None:
    """Return why the request must be refused, or None if it need not be."""
    found = miss(request, cluster, placement)
    if found is None or found.worker.requests <= 0:
        return None
    name = "first token" if found.missed == "slo_ttft" else "time per output token"
    reason = f"the {name} is expected to take {found.expected_s:.3g} s, the SLO is {found.asked_s:.3g} s"
    in_vain = found.alone_s > found.asked_s
    if in_vain:
        reason += f"; a worker with nothing else to do would need {found.alone_s:.3g} s"
    return Refusal(reason, found.missed, waiting_helps=not in_vain, retry_after_s=found.retry_after_s)


def miss(request: RequestFacts, cluster: Cluster, option: Option | Placement) -> PredictedMiss | None:
    """Return the SLO that the request is expected to miss, TTFT before TPOT, if any."""
    predicted = option.predicted
    first = cluster.get(next(iter(option.workers.values())))
    decode = cluster.get(option.workers["decode"])
    if predicted is None or first is None or decode is None:
        return None
    ttft_s = request.waited_s + predicted.ttft_s
    if ttft_s > request.slo_ttft_s:
        idle = replace(first, rows=0, context_tokens=0, prefill_tokens=0, prompts=0)
        alone_s = prefill_cost(request, idle, None).prefill_s
        return PredictedMiss("slo_ttft", first, ttft_s, request.slo_ttft_s, alone_s, ttft_s - alone_s)
    tpot_s = _tpot_s(request, predicted, decode)
    if tpot_s > request.slo_tpot_s:
        costs = costs_while_decoding(request, decode)
        alone_s = costs.decode_s(1, request.num_tokens) / max(costs.tokens_per_row, 1.0)
        return PredictedMiss("slo_tpot", decode, tpot_s, request.slo_tpot_s, alone_s, predicted.decode_s)
    return None


def _tpot_s(request: RequestFacts, predicted: Prediction, decode: WorkerSnapshot) -> float:
    """Predict the time per output token of the time after the prefill, when fewer of the current rows decode.

    A request that waits W seconds and then decodes for D spends D / (W + D) of its time decoding. So that
    share of the requests assigned to the worker decodes at any moment.
    """
    tpot_s = predicted.tpot_s(request.output_tokens)
    if predicted.decode_s <= 0:
        return tpot_s
    costs, share = (
        costs_while_decoding(request, decode),
        predicted.decode_s / (predicted.ttft_s + predicted.decode_s),
    )
    fewer_s = (1 - share) * (costs.row_s * decode.rows + costs.context_s * decode.context_tokens)
    return tpot_s - fewer_s / max(costs.tokens_per_row, 1.0)
