"""How the router sees its workers, and what it made of that: `/cluster` and `/decisions`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.openapi import Operation
from router.decisions import MAX_DECISIONS
from router.errors import ApiError
from router.registry import Worker
from router.state import RouterState

DEFAULT_LIMIT = 100


def placement_operations(state: RouterState) -> list[Operation]:
    async def decisions(request: Request) -> Response:
        found = state.placer.decisions.latest(_limit(request))
        return _json({"decisions": [decision.as_json() for decision in found]})

    async def cluster(request: Request) -> Response:
        config = state.config
        placement = {
            "prefill": config.prefill_placement or config.placement,
            "decode": config.decode_placement or config.placement,
            "disaggregation": config.disaggregation,
        }
        workers = list(state.registry)
        links = [link for worker in workers if worker.live for link in _links(worker)]
        shown = [_worker(worker) for worker in workers]
        return _json({"placement": placement, "workers": shown, "links": links})

    return [
        Operation(
            "/decisions",
            decisions,
            "The latest placements, with what they were expected to cost and what happened.",
            f"`decisions`, the newest first: {DEFAULT_LIMIT}, or `limit`",
        ),
        Operation(
            "/cluster",
            cluster,
            "The workers as placement sees them: load, KV, measured costs and links.",
            "`placement`, `workers`, `links`",
        ),
    ]


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isdecimal() or not 1 <= int(given[:10]) <= MAX_DECISIONS:
        message = f"limit: must be a number from 1 to {MAX_DECISIONS}, got {given[:20]!r}"
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
        "costs": costs,
    }


def _links(worker: Worker) -> list[dict[str, Any]]:
    """Its wires in use."""
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
