"""Bodies and answers that msgspec decodes and encodes, and their schemas in `/openapi.json`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import JSONResponse

from router.api.access import State
from router.decoding import SMALL_BYTES, decode_body
from router.errors import ErrorBody

T = TypeVar("T", bound=msgspec.Struct)

_REF = "#/components/schemas/{name}"
_bodies: dict[str, type[msgspec.Struct]] = {ErrorBody.__name__: ErrorBody}
"""The types that operations refer to, by name."""


class Json(JSONResponse):
    """An answer as JSON."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def posted(body: type[msgspec.Struct], answer: str) -> dict[str, Any]:
    """Return a route's options that describe its body, by the type's docstring, and its answer."""
    _bodies[body.__name__] = body
    described = {"requestBody": {"required": True, "content": _content(body)}}
    return {"summary": body.__doc__, "response_description": answer, "openapi_extra": described}


def small(body: type[T], default: bytes = b"") -> Callable[..., Awaitable[T]]:
    """Return a dependency that decodes an operator's body. An empty one means `default`."""

    async def read(request: Request, state: State) -> T:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            return decode_body(raw or default, body)

    return read


def error_answers() -> dict[int | str, dict[str, Any]]:
    """Return what all routes answer in addition to a 200."""
    return {"default": {"description": "The error", "content": _content(ErrorBody)}}


def add_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas of the bodies that routes refer to."""
    _, schemas = msgspec.json.schema_components(_bodies.values(), ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def _content(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
