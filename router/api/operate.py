"""Endpoints with which operators manage workers and adapters, and look at workers, requests, decisions and
bottlenecks. A change is answered when it is complete; a client that goes away does not cancel it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Depends, Query
from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from protocol.errors import InvalidRequestError
from protocol.requests import AdapterName, AdapterPath
from protocol.roles import MAX_WORKERS, ROLES
from router.api.access import Json, State, posted, small
from router.dispatch.drainer import DrainReport
from router.dispatch.placer import MAX_DECISIONS
from router.doctor import ClusterSample, WorkerSample, examine
from router.errors import ApiError
from router.requests.journal import LiveRequest
from router.state import RouterState
from router.workers.assignment import LiveStage
from router.workers.registry import Worker

_MOVED = "`moved`, `redirected` and `placed_again` requests, `seconds`"
DRAINED = f"`id`, {_MOVED}, once nothing runs there any more"

SCALED = (
    f"ids of the workers `started` and `drained`, {_MOVED}, once the new ones serve and the others are empty"
)


RESTARTED = f"ids of the workers `restarted` and of `successors`, {_MOVED}"


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """Move a worker's requests, with their KV, to other workers; then it leaves, and is not started again."""


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """Restart every worker's process, one after the other, while its requests go on elsewhere."""


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """Move a worker's requests elsewhere; then it serves in another role, with its weights and pool."""

    role: Annotated[str, Meta(description="`prefill` or `decode`, not `draft`, which is another model.")]


_Number = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_WORKERS})]


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """Set the number of workers of each role; requests of the ones that leave go on elsewhere."""

    prefill: Annotated[_Number | None, Meta(description="Prefill workers.")] = None
    decode: Annotated[_Number | None, Meta(description="Decode workers.")] = None
    draft: Annotated[_Number | None, Meta(description="Draft workers.")] = None


_Name = Annotated[AdapterName, Meta(description="The name that requests use for it.")]
_Path = Annotated[AdapterPath, Meta(description="Its folder, with the same path on each worker's host.")]


class LoadAdapterBody(msgspec.Struct):
    """Load a LoRA adapter in PEFT's format on every worker, or on none."""

    lora_name: _Name
    lora_path: _Path


class UnloadAdapterBody(msgspec.Struct):
    """Accept no more requests for a LoRA adapter. Requests that use it run to their end."""

    lora_name: _Name


router = APIRouter()


@router.post("/restart", **posted(RestartBody, RESTARTED))
async def restart(state: State, body: Annotated[RestartBody, Depends(small(RestartBody, b"{}"))]) -> Response:
    return _report(await asyncio.shield(asyncio.ensure_future(state.restarter.restart())))


@router.post("/workers/{worker_id}/drain", **posted(DrainBody, DRAINED))
async def drain(
    state: State, worker_id: str, body: Annotated[DrainBody, Depends(small(DrainBody, b"{}"))]
) -> Response:
    return await _drained(worker_id, state.drainer.drain(worker_id))


@router.post("/workers/{worker_id}/role", **posted(RoleBody, DRAINED))
async def change_role(
    state: State, worker_id: str, body: Annotated[RoleBody, Depends(small(RoleBody))]
) -> Response:
    known = {spec.name: spec for spec in ROLES.values() if state.config.num_replicas(spec)}
    if body.role not in known:
        raise InvalidRequestError("role", f"{body.role[:64]!r} is none of {', '.join(known)}")
    return await _drained(worker_id, state.drainer.change_role(worker_id, known[body.role]))


@router.post("/scale", **posted(ScaleBody, SCALED))
async def scale(state: State, body: Annotated[ScaleBody, Depends(small(ScaleBody))]) -> Response:
    targets = {role: count for role, count in msgspec.structs.asdict(body).items() if count is not None}
    if not targets:
        reason = f"name one role at least: {', '.join(ROLES)}"
        raise ApiError(400, reason, code="missing_required_parameter")
    for name, count in targets.items():
        if not 0 <= count <= MAX_WORKERS:
            raise InvalidRequestError(name, f"must be from 0 to {MAX_WORKERS}, got {count}")
    return _report(await asyncio.shield(asyncio.ensure_future(state.scaler.scale(targets))))


@router.post("/v1/load_lora_adapter", **posted(LoadAdapterBody, "a line of text"))
async def load(state: State, body: Annotated[LoadAdapterBody, Depends(small(LoadAdapterBody))]) -> Response:
    state.require_ready()
    await asyncio.shield(state.adapters.load(body.lora_name, body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", **posted(UnloadAdapterBody, "a line of text"))
async def unload(
    state: State, body: Annotated[UnloadAdapterBody, Depends(small(UnloadAdapterBody))]
) -> Response:
    await asyncio.shield(state.adapters.unload(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _drained(worker_id: str, drain: Coroutine[None, None, asyncio.Future[DrainReport]]) -> Response:
    done = await asyncio.shield(asyncio.ensure_future(drain))
    return _report(await asyncio.shield(done), id=worker_id)


def _report(report: Any, **about: str) -> Response:
    return Json({**about, **asdict(report), "seconds": round(report.seconds, 3)})


DEFAULT_LIMIT = 100
MAX_REQUESTS = 1000


@router.get(
    "/workers",
    response_description="`workers`, `awaited` (`id` and `role` of those that are being started or "
    "replaced), `router`",
)
async def show_workers(state: State) -> Response:
    """Show the workers, their load and their transfers."""
    about = {"id": state.router_id, "incarnation": state.incarnation, "pid": os.getpid()}
    known = {worker.key.worker_id for worker in state.registry}
    expected = state.registry.expected.items()
    awaited = [{"id": worker_id, "role": role} for worker_id, role in expected if worker_id not in known]
    return Json({"router": about, "workers": list(map(_worker, state.registry)), "awaited": awaited})


@router.get(
    "/decisions",
    response_description="`decisions`, the newest first, at most `limit`; `scaling`, the newest first",
)
async def show_decisions(
    state: State, limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = DEFAULT_LIMIT
) -> Response:
    """Show the latest placements, with what they were expected to cost and what happened, and changes of the
    number of workers by --autoscale.
    """
    found = [decision.as_json() for decision in state.placer.decisions.latest(limit)]
    return Json({"decisions": found, "scaling": [event.as_json() for event in state.autoscaler.log.latest()]})


@router.get(
    "/cluster",
    response_description="`placement`, `workers`, `awaited` (ids of workers that are being started), "
    "`links`, `drafts` (the number of requests by decode worker and by drafting worker)",
)
async def show_cluster(state: State) -> Response:
    """Show the workers as placement sees them: load, KV, measured costs and links."""
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
    response_description="`stages` (how many are in each), `requests`, the oldest first, at most `limit`",
)
async def show_requests(
    state: State, limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS)] = DEFAULT_LIMIT
) -> Response:
    """Show the requests under way: their stage, their workers and how far they are."""
    now, live = time.monotonic(), list(state.journal)
    numbers = Counter(each.stage.shown for each in live)
    stages = {stage: numbers[stage] for stage in get_args(LiveStage)}
    return Json({"stages": stages, "requests": [_request(each, now) for each in live[:limit]]})


@router.get("/doctor", response_description="`findings`, after `seconds` of watching")
async def diagnose(
    state: State, seconds: Annotated[float, Query(gt=0, le=60, allow_inf_nan=False)] = 3
) -> Response:
    """Find the bottlenecks that keep requests waiting now, and how to remove them, the most costly first."""
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
    found = sorted(counts.items(), key=str)
    return [{"decode": decode, "at": at, "requests": count} for (decode, at), count in found]


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
