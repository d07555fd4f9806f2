"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM. They are for operators."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from protocol.adapters import AdapterName, AdapterPath
from router.api.openapi import Operation
from router.bodies import SMALL_BYTES
from router.decoding import decode_body
from router.state import RouterState

_Name = Annotated[AdapterName, Meta(description="The name that requests use for it.")]
_Path = Annotated[AdapterPath, Meta(description="Its folder, with the same path on each worker's host.")]


class LoadAdapterBody(msgspec.Struct):
    """Load a LoRA adapter in PEFT's format on every worker, or on none."""

    lora_name: _Name
    lora_path: _Path


class UnloadAdapterBody(msgspec.Struct):
    """Accept no more requests for a LoRA adapter. Requests that use it run to their end."""

    lora_name: _Name


def adapter_operations(state: RouterState) -> list[Operation]:
    """Return the adapters' endpoints. A client that goes away does not cancel its request."""

    async def load(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            body = decode_body(raw, LoadAdapterBody)
        state.require_ready()
        await asyncio.shield(state.adapters.load(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            body = decode_body(raw, UnloadAdapterBody)
        await asyncio.shield(state.adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def post(path: str, endpoint: object, body: type[msgspec.Struct]) -> Operation:
        return Operation(path, endpoint, body.__doc__ or "", "a line of text", body)

    return [
        post("/v1/load_lora_adapter", load, LoadAdapterBody),
        post("/v1/unload_lora_adapter", unload, UnloadAdapterBody),
    ]
