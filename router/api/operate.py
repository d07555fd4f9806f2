"""Endpoints with which operators manage workers: `POST /scale`, `/restart`, `/workers/{id}/drain` and
`/role`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import InvalidRequestError
from protocol.roles import ROLES
from protocol.scaling import MAX_WORKERS
from router.api.openapi import Operation
from router.bodies import SMALL_BYTES
from router.decoding import decode_body
from router.dispatch.drainer import DrainReport
from router.errors import ApiError
from router.state import RouterState

ANSWER = (
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


def worker_operations(state: RouterState) -> list[Operation]:
    """Return the endpoints. They answer when the worker is empty; a client that goes away does not cancel
    its request.
    """

    async def drain(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            decode_body(raw or b"{}", DrainBody)
        return await _answer(request, state.drainer.drain(request.path_params["worker_id"]))

    async def role(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            name = decode_body(raw, RoleBody).role
        known = {spec.name: spec for spec in ROLES.values() if state.config.num_replicas(spec)}
        if name not in known:
            raise InvalidRequestError("role", f"{name[:64]!r} is none of {', '.join(known)}")
        return await _answer(
            request, state.drainer.change_role(request.path_params["worker_id"], known[name])
        )

    async def restart(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            decode_body(raw or b"{}", RestartBody)
        report = asdict(await asyncio.shield(asyncio.ensure_future(state.restarter.restart())))
        body = report | {"seconds": round(report["seconds"], 3)}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def scale(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            body = decode_body(raw, ScaleBody)
        targets = {role: count for role, count in msgspec.structs.asdict(body).items() if count is not None}
        if not targets:
            raise ApiError(
                400, f"name one role at least: {', '.join(ROLES)}", code="missing_required_parameter"
            )
        for name, count in targets.items():
            if not 0 <= count <= MAX_WORKERS:
                raise InvalidRequestError(name, f"must be from 0 to {MAX_WORKERS}, got {count}")
        report = await asyncio.shield(asyncio.ensure_future(state.scaler.scale(targets)))
        return _json({**asdict(report), "seconds": round(report.seconds, 3)})

    def post(path: str, body: type[msgspec.Struct], endpoint: object, answer: str = ANSWER) -> Operation:
        return Operation(path, endpoint, body.__doc__ or "", answer, body)

    return [
        post("/restart", RestartBody, restart, RESTARTED),
        post("/workers/{worker_id}/drain", DrainBody, drain),
        post("/workers/{worker_id}/role", RoleBody, role),
        post("/scale", ScaleBody, scale, SCALED),
    ]


async def _answer(request: Request, drain: Coroutine[None, None, asyncio.Future[DrainReport]]) -> Response:
    done = await asyncio.shield(asyncio.ensure_future(drain))
    report = asdict(await asyncio.shield(done))
    body = {"id": request.path_params["worker_id"], **report, "seconds": round(report["seconds"], 3)}
    return _json(body)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
