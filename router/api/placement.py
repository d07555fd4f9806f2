"""Endpoints that show the workers and requests as the router sees them, and its decisions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.openapi import Operation
from router.dispatch.decisions import MAX_DECISIONS
from router.errors import ApiError
from router.requests.journal import LIVE_STAGES, LiveRequest
from router.state import RouterState
from router.workers.registry import Worker

DEFAULT_LIMIT = 100
MAX_REQUESTS = 1000


def placement_operations(state: RouterState) -> list[Operation]:
    async def decisions(request: Request) -> Response:
        found = state.placer.decisions.latest(_limit(request, MAX_DECISIONS))
        scaling = [event.as_json() for event in state.autoscaler.log.latest()]
        return _json({"decisions": [decision.as_json() for decision in found], "scaling": scaling})

    async def cluster(request: Request) -> Response:
        config = state.config
        placement = {
            "prefill": config.prefill_placement or config.placement,
            "decode": config.decode_placement or config.placement,
            "disaggregation": config.disaggregation,
            "drafts": config.draft_placement,
        }
        workers = list(state.registry)
        links = [link for worker in workers if worker.live for link in _links(worker)]
        shown = [_worker(worker) for worker in workers]
        awaited = state.registry.awaited()
        drafts = _drafts(state.journal)
        found = {"placement": placement, "workers": shown, "awaited": awaited, "links": links}
        return _json(found | {"drafts": drafts})

    async def requests(request: Request) -> Response:
        limit, now = _limit(request, MAX_REQUESTS), time.monotonic()
        live = list(state.journal)
        numbers = Counter(each.stage for each in live)
        stages = {stage: numbers[stage] for stage in LIVE_STAGES}
        return _json({"stages": stages, "requests": [_request(each, now) for each in live[:limit]]})

    return [
        Operation(
            "/decisions",
            decisions,
            "The latest placements, with what they were expected to cost and what happened, and changes "
            "of the number of workers by --autoscale.",
            f"`decisions`, the newest first: {DEFAULT_LIMIT}, or `limit`; `scaling`, the newest first",
        ),
        Operation(
            "/cluster",
            cluster,
            "The workers as placement sees them: load, KV, measured costs and links.",
            "`placement`, `workers`, `awaited` (ids of workers that are being started), `links`, `drafts` "
            "(the number of requests by decode worker and by drafting worker)",
        ),
        Operation(
            "/requests",
            requests,
            "The requests under way: their stage, their workers and how far they are.",
            f"`stages` (how many are in each), `requests`, the oldest first: {DEFAULT_LIMIT}, or `limit`",
        ),
    ]


def _limit(request: Request, most: int) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isdecimal() or not 1 <= int(given[:10]) <= most:
        message = f"limit: must be a number from 1 to {most}, got {given[:20]!r}"
        raise ApiError(400, message, param="limit", code="invalid_value")
    return int(given)


def _worker(worker: Worker) -> dict[str, Any]:
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
    """Return the states of recurrent layers that are kept for later prompts; None if there are no such
    layers.
    """
    if "kept_states" not in counters:
        return None
    return {
        "count": counters["kept_states"],
        "bytes": counters["kept_state_bytes"],
        "hits": counters["kept_state_hits_total"],
        "evictions": counters["kept_states_evicted_total"],
    }


def _request(request: LiveRequest, now: float) -> dict[str, Any]:
    choice, plan = request.choice, request.draft_plan
    return {
        "request_id": request.request_id,
        "stage": request.stage,
        "workers": dict(request.workers) if request.assigned else {},
        "drafts_at": None if plan is None or plan.at is None else plan.at.worker_id,
        "seconds": now - request.generation.arrival,
        "prompt_tokens": len(choice.prompt.token_ids),
        "tokens": choice.num_tokens,
        "drafted_tokens": choice.drafted_tokens,
        "accepted_tokens": choice.accepted_tokens,
    }


def _drafter(request: LiveRequest) -> str | None:
    """Return the id of the worker that drafts for the request."""
    period = request.drafts.current
    if period is None or period.decision.place.method is None:
        return None
    return period.decision.place.at or period.worker_id


def _drafts(requests: Iterable[LiveRequest]) -> list[dict[str, Any]]:
    planned = [request for request in requests if request.drafts.current is not None]
    counts = Counter((request.assigned["decode"].key.worker_id, _drafter(request)) for request in planned)
    return [
        {"decode": decode, "at": at, "requests": count}
        for (decode, at), count in sorted(counts.items(), key=str)
    ]


def _links(worker: Worker) -> list[dict[str, Any]]:
    """Return the worker's connections in use."""
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


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
