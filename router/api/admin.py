"""Models, health, version, metrics, workers."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.registry import Worker
from router.state import RouterState
from router.validation import check_model


def admin_routes(state: RouterState) -> APIRouter:
    """Everything that is read with GET."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_card(state)]})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        check_model(state.config, model_id)
        return _json(_model_card(state))

    @router.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        reason = state.not_ready()
        if reason is None:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": reason}, status=503)

    @router.get("/version")
    async def version() -> Response:
        return _json({"version": _version()})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/workers")
    async def workers() -> Response:
        return _json({"workers": [_worker(worker) for worker in state.registry]})

    return router


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _model_card(state: RouterState) -> dict[str, Any]:
    facts = state.registry.model
    return {
        "id": state.config.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "tandem",
        "root": state.config.model,
        "parent": None,
        "max_model_len": facts.max_model_len if facts is not None else state.config.max_model_len,
        "permission": [],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _worker(worker: Worker) -> dict[str, Any]:
    state = worker.state
    snapshot = worker.snapshot()
    return {
        "id": worker.key.worker_id,
        "role": worker.role,
        "incarnation": worker.key.incarnation,
        "lifecycle": state.lifecycle if worker.live else "silent",
        "silent_s": round(time.monotonic() - worker.last_seen, 3),
        "num_running": state.num_running,
        "num_waiting": state.num_waiting,
        "outstanding_requests": worker.outstanding_requests,
        "outstanding_prefill_tokens": worker.outstanding_prefill_tokens,
        "total_blocks": state.total_blocks,
        "free_blocks": state.free_blocks,
        "cached_blocks": state.cached_blocks,
        "kv_usage": round(snapshot.kv_usage, 4),
        "num_preemptions": state.num_preemptions,
        "prefix_query_tokens": state.prefix_query_tokens,
        "prefix_hit_tokens": state.prefix_hit_tokens,
        "transports": state.transports,
        "pairs": state.pairs,
        "counters": state.counters,
        "speculation": state.speculation,
        "start_up": worker.start_up,
    }
