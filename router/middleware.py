"""The outermost layer around each request, its error answers, and the guard against other sites."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Collection
from functools import lru_cache
from urllib.parse import urlsplit

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import InvalidRequestError
from protocol.ports import is_loopback
from router.errors import ApiError, anthropic_body, client_gone, speaks_anthropic
from router.observe.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "tandem.request_id"
ANSWER_HEADERS = "tandem.answer_headers"
"""Key, in the scope, of headers for every response to the request; endpoints may append to the list."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class Envelope:
    """The layer that gives each request an id, adds headers to its response, and counts the statuses.

    A request's path may begin with the root path.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, root_path: str | None) -> None:
        self._app = app
        self._root_path = root_path
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # routes answer GET, and the connection leaves the body out
            scope = {**scope, "method": "GET"}
        if self._root_path is not None:
            path = scope["path"].removeprefix(f"{self._root_path}/").removeprefix("/")
            scope = {**scope, "path": f"/{path}", "root_path": self._root_path}
        request_id = _request_id(scope)
        scope[REQUEST_ID_KEY] = request_id
        answer_headers = scope[ANSWER_HEADERS] = [(b"x-request-id", request_id.encode())]
        if speaks_anthropic(scope["path"]):
            answer_headers.append((b"request-id", request_id.encode()))
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *answer_headers]
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.count("http_responses_total", status or 499)  # the handler was cancelled


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a failed request in the format of its API."""
    api_error = _as_api_error(error, request.scope)
    is_anthropic = speaks_anthropic(request.scope["path"])
    body = anthropic_body(api_error, request.scope[REQUEST_ID_KEY]) if is_anthropic else None
    return api_error.response(body)


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    match error:
        case ApiError():
            return error
        case ClientDisconnect():
            return client_gone()
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case RequestValidationError():
            first = error.errors()[0]
            field, value = first["loc"][-1], str(first["input"])[:20]
            message = f"{field}: {first['msg']}, got {value!r}"
            return ApiError(400, message, param=field, code="invalid_value")
        case HTTPException(status_code=404):
            return ApiError(404, f"there is no {scope['path']}")
        case HTTPException(status_code=405):
            message = f"{scope['path']} does not take {scope['method']}"
            return ApiError(405, message, headers=error.headers)
    http_id = scope[REQUEST_ID_KEY]
    logger.error("request %s failed", http_id, exc_info=error, extra={"http_request_id": http_id})
    return ApiError(500, "internal error; the server's log has the details")


def _request_id(scope: Scope) -> str:
    """Return the client's request id if it is short and printable, else a new one."""
    found = (value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id")
    request_id = next(found, "")
    return request_id if _REQUEST_ID.match(request_id) else secrets.token_hex(16)


_READS = ("GET", "HEAD", "OPTIONS")
_REMEDY = "or start the server with API keys (--api-key-file) or --allowed-origins"


class BrowserGuard:
    """A check of requests' `Host` and `Origin` headers. `host`: the address that HTTP listens on.

    `origins`: the values of --allowed-origins.
    """

    def __init__(self, host: str, origins: Collection[str]) -> None:
        self._is_loopback = is_loopback(host)
        self._origins = origins

    def check(self, method: str, headers: Headers) -> None:
        """Raise `ApiError` 403 if the request may come from another site's page."""
        host = headers.get("host", "")
        if self._is_loopback and not _is_local(host):
            raise ApiError(403, f"Host: {host[:128]!r} is not this host: ask for localhost, {_REMEDY}")
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if method not in _READS and origin.partition("://")[2] != host:
            page = f"Origin: a page of {origin[:128]!r}"
            raise ApiError(403, f"{page} may not use this server: use the server's own, {_REMEDY}")


@lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    """Return whether `host` is an IP address or a local name: no stranger can make these resolve to us."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
