"""Admission of requests, and the coding and description (`/openapi.json`) of bodies and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from router.api_keys import Admission, ApiKey
from router.decoding import SMALL_BYTES, decode_body
from router.errors import ApiError, ErrorBody
from router.state import RouterState

BEARER = HTTPBearer(auto_error=False, description="Or the header `x-api-key`.")
"""Describes the API key in `/openapi.json`; `admit` checks it."""


async def _state(request: Request) -> RouterState:
    found: RouterState = request.app.state.router
    return found


State = Annotated[RouterState, Depends(_state)]


@contextmanager
def admit(state: RouterState, scope: Scope, *, is_operator: bool = False) -> Iterator[Admission]:
    """Count a request against the limits of its API key while it is served. Raises `ApiError`."""
    admission = _key(state, scope, is_operator).admit()
    try:
        yield admission
    finally:
        admission.end()


async def admitted(request: Request, state: State) -> AsyncIterator[Admission]:
    """Admit any client until its answer is sent."""
    with admit(state, request.scope) as admission:
        yield admission


Admitted = Annotated[Admission, Depends(admitted)]


async def operator(request: Request, state: State) -> AsyncIterator[None]:
    """Admit an operator until the answer is sent."""
    with admit(state, request.scope, is_operator=True):
        yield


async def guarded(request: Request, state: State) -> None:
    """Refuse pages of other sites on paths that need no key, if the server has no keys."""
    if not state.keys.are_needed:
        state.guard.check(request.method, request.headers)


def _key(state: RouterState, scope: Scope, is_operator: bool) -> ApiKey:
    headers = Headers(scope=scope)
    if not state.keys.are_needed:
        state.guard.check(scope["method"], headers)
        return state.keys.anonymous
    key = state.keys.find(_token(headers))
    if key is None:
        needed = "a valid API key is needed, as `Authorization: Bearer <key>` or `x-api-key: <key>`"
        asked = {"www-authenticate": "Bearer"}
        raise ApiError(401, needed, code="invalid_api_key", headers=asked)
    if is_operator and not key.entry.operator:
        name, path = key.entry.name, scope["path"]
        raise ApiError(403, f"{path} is for operators, which the API key {name} is not")
    return key


def _token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


T = TypeVar("T", bound=msgspec.Struct)

_REF = "#/components/schemas/{name}"
_bodies: dict[str, type[msgspec.Struct]] = {ErrorBody.__name__: ErrorBody}
"""The types, by name, that operations refer to."""


class Json(JSONResponse):
    """An answer as JSON."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def posted(body: type[msgspec.Struct], answer: str) -> dict[str, Any]:
    """Return a route's options that describe its body, by the docstring of its type, and its answer."""
    _bodies[body.__name__] = body
    described = {"requestBody": {"required": True, "content": _content(body)}}
    return {"description": body.__doc__, "response_description": answer, "openapi_extra": described}


def small(body: type[T], default: bytes = b"") -> Callable[..., Awaitable[T]]:
    """Return a dependency that decodes an operator's body. An empty body counts as `default`."""

    async def read(request: Request, state: State) -> T:
        async with state.bodies.read(request, SMALL_BYTES) as raw:
            return decode_body(raw or default, body)

    return read


def error_answers() -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of the errors that every route can answer."""
    return {"default": {"description": "The error", "content": _content(ErrorBody)}}


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas of the types that routes refer to. Descriptions, which FastAPI takes from docstrings,
    become the routes' summaries.
    """
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["summary"] = " ".join(operation.pop("description", operation["summary"]).split())
    _, schemas = msgspec.json.schema_components(_bodies.values(), ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def _content(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
