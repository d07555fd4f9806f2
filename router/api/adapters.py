"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM. They are for operators.

A client that goes away does not cancel its request.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from protocol.adapters import AdapterName, AdapterPath
from router.api.access import State
from router.api.openapi import posted, small

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
