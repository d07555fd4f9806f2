"""Endpoints for models, health, version, metrics and workers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from protocol.adapters import Adapter
from protocol.version import version
from router.api.openapi import Operation
from router.state import RouterState
from router.workers.registry import Worker

_WORKERS = "`workers`, `awaited` (`id` and `role` of those that are being started or replaced), `router`"


def admin_operations(state: RouterState) -> list[Operation]:
    """Return the endpoints that report the server's state."""

    async def models(request: Request) -> Response:
        adapters = state.adapters.named.values()
        base = _model_card(state)
        return _json({"object": "list", "data": [base, *(_adapter_card(base, each) for each in adapters)]})

    async def model(request: Request) -> Response:
        base, adapter = _model_card(state), state.adapters.find(request.path_params["model_id"])
        return _json(base if adapter is None else _adapter_card(base, adapter))

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        reason = state.not_ready()
        if reason is None:
            awaited = state.registry.awaited()
            return _json({"status": "ready", **({"awaited": awaited} if awaited else {})})
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def show_version(request: Request) -> Response:
        return _json({"version": version()})

    async def metrics(request: Request) -> Response:
        return Response(await asyncio.to_thread(state.metrics.render), media_type=CONTENT_TYPE_LATEST)

    async def workers(request: Request) -> Response:
        router = {"id": state.router_id, "incarnation": state.incarnation, "pid": os.getpid()}
        known = {worker.key.worker_id for worker in state.registry}
        awaited = [
            {"id": worker_id, "role": role}
            for worker_id, role in state.registry.expected.items()
            if worker_id not in known
        ]
        shown = [_worker(worker) for worker in state.registry]
        return _json({"router": router, "workers": shown, "awaited": awaited})

    return [
        Operation(
            "/v1/models",
            models,
            "The model, and its adapters with it as their `parent`.",
            "OpenAI's list of models",
        ),
        Operation("/v1/models/{model_id:path}", model, "One model.", "OpenAI's model, with `max_model_len`"),
        Operation("/health", health, "Whether the router lives.", "`status`"),
        Operation(
            "/ready",
            ready,
            "Whether requests are served, and which workers are `awaited`; 503 with a `reason` if not.",
            "`status`",
        ),
        Operation("/version", show_version, "Tandem's version.", "`version`"),
        Operation("/metrics", metrics, "Metrics of the router and of all workers.", "Prometheus text format"),
        Operation("/workers", workers, "The workers, their load and their transfers.", _WORKERS),
    ]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _adapter_card(base: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    return {**base, "id": adapter.name, "root": adapter.path, "parent": base["id"]}


def _model_card(state: RouterState) -> dict[str, Any]:
    facts = state.registry.model
    return {
        "id": state.config.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "tandem",
        "root": state.config.model,
        "parent": None,
        "default_sampling_params": state.defaults,
        "deterministic": _deterministic(state),
        "max_model_len": facts.max_model_len if facts is not None else state.config.max_model_len,
        "capabilities": {
            "completions": True,
            "chat_completions": state.chats.has_template,
            "responses": state.chats.has_template,
            "messages": state.chats.has_template,
            "embeddings": state.config.enable_embeddings,
            "tools": state.chats.has_tools,
            "reasoning": state.chats.has_reasoning,
        },
        "permission": [],
    }


def _deterministic(state: RouterState) -> bool | None:
    """Tell whether all workers give a request the same bits in every batch; None without workers."""
    told = [worker.start_up.get("deterministic") == "yes" for worker in state.registry]
    return all(told) if told else None


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
