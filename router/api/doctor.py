"""`GET /doctor`: reports the bottlenecks that keep requests waiting, and how to remove them."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.openapi import Operation
from router.doctor.samples import sample
from router.doctor.verdicts import examine
from router.errors import ApiError
from router.state import RouterState

DEFAULT_SECONDS = 3.0
MOST_SECONDS = 60.0


def doctor_operations(state: RouterState) -> list[Operation]:
    async def doctor(request: Request) -> Response:
        seconds = _seconds(request)
        before = sample(state)
        await asyncio.sleep(seconds)
        after = sample(state)
        findings = [msgspec.structs.asdict(finding) for finding in examine(before, after)]
        body = msgspec.json.encode({"seconds": after.at - before.at, "findings": findings})
        return Response(body, media_type="application/json")

    return [
        Operation(
            "/doctor",
            doctor,
            "The bottlenecks that keep requests waiting now, and how to remove them, the most costly first.",
            f"`findings`, after `seconds` of watching (a parameter: {DEFAULT_SECONDS:g} unless given)",
        )
    ]


def _seconds(request: Request) -> float:
    given = request.query_params.get("seconds", str(DEFAULT_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        message = f"seconds: must be a number above 0, at most {MOST_SECONDS:g}, got {given[:20]!r}"
        raise ApiError(400, message, param="seconds", code="invalid_value")
    return seconds
