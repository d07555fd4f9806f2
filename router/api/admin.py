"""Endpoints for models, health, version, metrics and workers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from protocol.adapters import Adapter
from protocol.version import version
from router.api.access import State
from router.api.openapi import Json
from router.state import RouterState
from router.workers.registry import Worker

models = APIRouter()
health = APIRouter()
workers = APIRouter()


@models.get(
    "/v1/models",
    summary="The model, and its adapters with it as their `parent`.",
    response_description="OpenAI's list of models",
)
async def list_models(state: State) -> Response:
    base = _model_card(state)
    cards = [_adapter_card(base, each) for each in state.adapters.named.values()]
    return Json({"object": "list", "data": [base, *cards]})


@models.get(
    "/v1/models/{model_id:path}",
    summary="One model.",
    response_description="OpenAI's model, with `max_model_len`",
)
async def show_model(state: State, model_id: str) -> Response:
    base, adapter = _model_card(state), state.adapters.find(model_id)
    return Json(base if adapter is None else _adapter_card(base, adapter))


@health.get("/health", summary="Whether the router lives.", response_description="`status`")
async def show_health() -> Response:
    return Json({"status": "ok"})


@health.get(
    "/ready",
    summary="Whether requests are served, and which workers are `awaited`; 503 with a `reason` if not.",
    response_description="`status`",
)
async def show_readiness(state: State) -> Response:
    reason = state.not_ready()
    if reason is not None:
        return Json({"status": "not ready", "reason": reason}, status_code=503)
    awaited = state.registry.awaited()
    return Json({"status": "ready", **({"awaited": awaited} if awaited else {})})


@health.get("/version", summary="Tandem's version.", response_description="`version`")
async def show_version() -> Response:
    return Json({"version": version()})


@health.get(
    "/metrics",
    summary="Metrics of the router and of all workers.",
    response_description="Prometheus text format",
)
async def show_metrics(state: State) -> Response:
    return Response(await asyncio.to_thread(state.metrics.render), media_type=CONTENT_TYPE_LATEST)


@workers.get(
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
        "default_sampling_params": state.defaults.shown(),
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
