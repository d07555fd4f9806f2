"""Endpoints that show operators the workers, the requests, the router's decisions, and bottlenecks."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from router.api.access import Json, State
from router.dispatch.placer import MAX_DECISIONS
from router.doctor import ClusterSample, WorkerSample, examine
from router.requests.journal import LiveRequest
from router.state import RouterState
from router.workers.assignment import LiveStage
from router.workers.registry import Worker

DEFAULT_LIMIT = 100
MAX_REQUESTS = 1000


router = APIRouter()


@router.get(
    "/workers",
    summary="The workers, their load and their transfers.",
    response_description="`workers`, `awaited` (`id` and `role` of those that are being started or "
    "replaced), `router`",
)
async def show_workers(state: State) -> Response:
    about = {"id": state.router_id, "incarnation": state.incarnation, "pid": os.getpid()}
    known = {worker.key.worker_id for worker in state.registry}
    expected = state.registry.expected.items()
    awaited = [{"id": worker_id, "role": role} for worker_id, role in expected if worker_id not in known]
    return Json({"router": about, "workers": list(map(_worker, state.registry)), "awaited": awaited})


@router.get(
    "/decisions",
    summary="The latest placements, with what they were expected to cost and what happened, and changes of "
    "the number of workers by --autoscale.",
    response_description="`decisions`, the newest first, at most `limit`; `scaling`, the newest first",
)
async def show_decisions(
    state: State, limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = DEFAULT_LIMIT
) -> Response:
    found = [decision.as_json() for decision in state.placer.decisions.latest(limit)]
    return Json({"decisions": found, "scaling": [event.as_json() for event in state.autoscaler.log.latest()]})


@router.get(
    "/cluster",
    summary="The workers as placement sees them: load, KV, measured costs and links.",
    response_description="`placement`, `workers`, `awaited` (ids of workers that are being started), "
    "`links`, `drafts` (the number of requests by decode worker and by drafting worker)",
)
async def show_cluster(state: State) -> Response:
    config, workers = state.config, list(state.registry)
    placement = {
        "prefill": config.prefill_placement or config.placement,
        "decode": config.decode_placement or config.placement,
        "disaggregation": config.disaggregation,
        "drafts": config.draft_placement,
    }
    found = {
        "placement": placement,
        "workers": list(map(_placed_worker, workers)),
        "awaited": state.registry.awaited(),
        "links": [link for worker in workers if worker.live for link in _links(worker)],
        "drafts": _drafts(state.journal),
    }
    return Json(found)


@router.get(
    "/requests",
    summary="The requests under way: their stage, their workers and how far they are.",
    response_description="`stages` (how many are in each), `requests`, the oldest first, at most `limit`",
)
async def show_requests(
    state: State, limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS)] = DEFAULT_LIMIT
) -> Response:
    now, live = time.monotonic(), list(state.journal)
    numbers = Counter(each.stage.shown for each in live)
    stages = {stage: numbers[stage] for stage in get_args(LiveStage)}
    return Json({"stages": stages, "requests": [_request(each, now) for each in live[:limit]]})


@router.get(
    "/doctor",
    summary="The bottlenecks that keep requests waiting now, and how to remove them, the most costly first.",
    response_description="`findings`, after `seconds` of watching",
)
async def diagnose(
    state: State, seconds: Annotated[float, Query(gt=0, le=60, allow_inf_nan=False)] = 3
) -> Response:
    before = _sample(state)
    await asyncio.sleep(seconds)
    after = _sample(state)
    return Json({"seconds": after.at - before.at, "findings": examine(before, after)})


def _lifecycle(worker: Worker) -> str:
    if not worker.live:
        return "silent"
    return "draining" if worker.draining else "ready"


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.key.worker_id,
        "host": worker.host,
        "pid": worker.pid,
        "lifecycle": _lifecycle(worker),
        "silent_s": round(worker.silence_s, 3),
        "outstanding_requests": worker.outstanding_requests,
        "outstanding_prefill_tokens": worker.outstanding_prefill_tokens,
        "kv_usage": round(worker.state.kv_usage, 4),
        "start_up": worker.start_up,
        **msgspec.structs.asdict(worker.state),
    }


def _placed_worker(worker: Worker) -> dict[str, Any]:
    load, costs = worker.load, msgspec.structs.asdict(worker.state.costs)
    return {
        "id": worker.key.worker_id,
        "role": worker.role.name,
        "host": worker.host,
        "ready": worker.live and worker.is_reachable,
        "load": {
            "requests": load.requests,
            "rows": load.rows,
            "context_tokens": load.context_tokens,
            "prompts": load.prompts,
            "prefill_tokens": load.prefill_tokens,
        },
        "kv": {"tokens": load.kv_tokens, "usage": load.kv_usage},
        "states": _states(worker.state.counters),
        "costs": costs,
    }


def _states(counters: Mapping[str, float]) -> dict[str, float] | None:
    """Return the counters of stored states of recurrent layers; None if the model has no such layers."""
    if "kept_states" not in counters:
        return None
    return {
        "count": counters["kept_states"],
        "bytes": counters["kept_state_bytes"],
        "hits": counters["kept_state_hits_total"],
        "evictions": counters["kept_states_evicted_total"],
    }


def _request(request: LiveRequest, now: float) -> dict[str, Any]:
    choice, plan = request.choice, request.drafts.plan
    return {
        "request_id": request.request_id,
        "stage": request.stage.shown,
        "workers": {} if request.current is None else request.worker_ids,
        "drafts_at": None if plan is None or plan.at is None else plan.at.worker_id,
        "seconds": now - request.generation.arrival,
        "prompt_tokens": len(choice.prompt.token_ids),
        "tokens": choice.num_tokens,
        "drafted_tokens": choice.drafted_tokens,
        "accepted_tokens": choice.accepted_tokens,
    }


def _drafts(requests: Iterable[LiveRequest]) -> list[dict[str, Any]]:
    periods = [request.drafts.current for request in requests]
    counts = Counter((period.worker_id, period.made_by) for period in periods if period is not None)
    return [
        {"decode": decode, "at": at, "requests": count}
        for (decode, at), count in sorted(counts.items(), key=str)
    ]


def _links(worker: Worker) -> list[dict[str, Any]]:
    return [
        {
            "from": worker.key.worker_id,
            "to": pair.peer,
            "transport": pair.transport,
            "latency_s": pair.latency_s,
            "bytes_per_s": pair.bytes_per_s,
        }
        for pair in worker.state.pairs
        if pair.in_use
    ]


def _sample(state: RouterState) -> ClusterSample:
    totals, refused = _totals(state)
    return ClusterSample(
        at=time.monotonic(),
        workers=[
            WorkerSample(worker.state, replace(worker.load), state.placer.ahead.num_held(worker))
            for worker in state.registry.live()
        ],
        live=len(state.journal),
        parked=state.placer.num_parked,
        max_num_seqs=state.config.max_num_seqs,
        totals=totals,
        refused=refused,
    )


def _totals(state: RouterState) -> tuple[dict[str, float], dict[str, float]]:
    """Return the router's own metrics, each summed over its labels, and the refused requests by reason."""
    totals: defaultdict[str, float] = defaultdict(float)
    refused: dict[str, float] = {}
    for name, labels, value in state.metrics.own_samples():
        totals[name] += value
        if name == "requests_refused_total":
            refused[labels["reason"]] = value
    return dict(totals), refused
