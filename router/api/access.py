"""Admits requests: FastAPI dependencies, and the same check for endpoints without them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope

from router.api_keys import Admission, ApiKey
from router.errors import ApiError
from router.state import RouterState

BEARER = HTTPBearer(auto_error=False, description="Or the header `x-api-key`.")
"""Tells `/openapi.json` of the key; `admit` reads it."""


async def _state(request: Request) -> RouterState:
    found: RouterState = request.app.state.router
    return found


State = Annotated[RouterState, Depends(_state)]


@contextmanager
def admit(state: RouterState, scope: Scope, *, is_operator: bool = False) -> Iterator[Admission]:
    """Count a request against its API key's limits while it is served. Raises `ApiError`."""
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
    """Keep other sites' pages away from paths that need no key, if the server has none."""
    if not state.keys.are_needed:
        state.guard.check(request.method, request.headers)


def _key(state: RouterState, scope: Scope, is_operator: bool) -> ApiKey:
    headers = Headers(scope=scope)
    if not state.keys.are_needed:
        state.guard.check(scope["method"], headers)
        return state.keys.anonymous
    key = state.keys.find(_token(headers))
    if key is None:
        raise ApiError(
            401,
            "a valid API key is needed, as `Authorization: Bearer <key>` or `x-api-key: <key>`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    if is_operator and not key.entry.operator:
        name, path = key.entry.name, scope["path"]
        raise ApiError(403, f"{path} is for operators, which the API key {name} is not")
    return key


def _token(headers: Headers) -> str:
    """Return the API key that the client gave."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
