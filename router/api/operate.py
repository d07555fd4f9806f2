"""Endpoints with which operators manage workers: `POST /scale`, `/restart`, `/workers/{id}/drain` and
`/role`; and as in vLLM adapters: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. They answer when the
change is complete. A client that goes away does not cancel its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from protocol.errors import InvalidRequestError
from protocol.requests import AdapterName, AdapterPath
from protocol.roles import MAX_WORKERS, ROLES
from router.api.access import Json, State, posted, small
from router.dispatch.drainer import DrainReport
from router.errors import ApiError

DRAINED = (
    "`id`, `moved`, `redirected` and `placed_again` requests, `seconds`, once nothing runs there any more"
)

SCALED = (
    "ids of the workers `started` and `drained`, `moved`, `redirected` and `placed_again` requests, `seconds`"
    ", once the new ones serve and nothing runs on the others"
)


RESTARTED = (
    "ids of the workers `restarted` and of `successors`, `moved`, `redirected` and `placed_again` requests"
    ", `seconds`"
)


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
