"""Health, version and metrics, for everybody."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from protocol.version import version
from router.api.access import State
from router.api.openapi import Json

router = APIRouter()


@router.get("/health", summary="Whether the router lives.", response_description="`status`")
async def show_health() -> Response:
    return Json({"status": "ok"})


@router.get(
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


@router.get("/version", summary="Tandem's version.", response_description="`version`")
async def show_version() -> Response:
    return Json({"version": version()})


@router.get(
    "/metrics",
    summary="Metrics of the router and of all workers.",
    response_description="Prometheus text format",
)
async def show_metrics(state: State) -> Response:
    return Response(await asyncio.to_thread(state.metrics.render), media_type=CONTENT_TYPE_LATEST)
