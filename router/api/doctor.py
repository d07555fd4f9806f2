"""`GET /doctor`: reports the bottlenecks that keep requests waiting, and how to remove them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from router.api.access import State
from router.api.openapi import Json
from router.doctor.samples import sample
from router.doctor.verdicts import examine

router = APIRouter()


@router.get(
    "/doctor",
    summary="The bottlenecks that keep requests waiting now, and how to remove them, the most costly first.",
    response_description="`findings`, after `seconds` of watching",
)
async def diagnose(
    state: State, seconds: Annotated[float, Query(gt=0, le=60, allow_inf_nan=False)] = 3
) -> Response:
    before = sample(state)
    await asyncio.sleep(seconds)
    after = sample(state)
    return Json({"seconds": after.at - before.at, "findings": examine(before, after)})
