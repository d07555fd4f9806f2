"""The outermost layer around each request: request id, API key, error responses, and a count of statuses."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import InvalidRequestError
from router.anthropic.errors import error_body, speaks_anthropic
from router.api_keys import Admission, ApiKeys
from router.browsers import BrowserGuard
from router.errors import ApiError, client_gone
from router.observe.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "tandem.request_id"
ANSWER_HEADERS = "tandem.answer_headers"
"""The scope's key for headers that every response to the request gets; endpoints may append to the list."""
ADMISSION = "tandem.admission"
"""The scope's key for the `Admission` of the request's API key; absent if the path needs no key."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_OPEN = ("/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json")
_OPEN_FOLDER = "/page/"
_OF_CLIENTS = ("/v1/", "/v2/", "/score", "/rerank", "/tokenize", "/detokenize")
_OF_OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def needs_key(path: str) -> bool:
    """Return whether the path needs an API key. As in vLLM, health and metrics need none. The pages need
    none either, since they show nothing of requests.
    """
    return path not in _OPEN and not path.startswith(_OPEN_FOLDER)


def is_for_operators(path: str) -> bool:
    """Return whether the path changes or shows anything that does not belong to the client."""
    return path in _OF_OPERATORS or not path.startswith(_OF_CLIENTS)


class Envelope:
    """The outermost layer of the application.

    It checks the API key and counts the request against the key's limits before it reads the body, on every
    path that needs a key.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: ApiKeys, guard: BrowserGuard) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope[REQUEST_ID_KEY] = request_id
        answer_headers = scope[ANSWER_HEADERS] = [(b"x-request-id", request_id.encode())]
        is_anthropic = speaks_anthropic(scope["path"])
        if is_anthropic:
            answer_headers.append((b"request-id", request_id.encode()))
        status = 0
        admission: Admission | None = None

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *answer_headers]
            return send(message)

        try:
            admission = self._admit(scope)
            if admission is not None:
                scope[ADMISSION] = admission
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise
            told = _as_api_error(error, scope)
            body = error_body(told, request_id) if is_anthropic else None
            await told.response(body)(scope, receive, send_with_id)
        finally:
            if admission is not None:
                admission.end()
            self._metrics.http_response(status or 499)  # the handler was cancelled

    def _admit(self, scope: Scope) -> Admission | None:
        """Return the key's admission, or None if the path needs no key. Raises `ApiError`."""
        headers, path = Headers(scope=scope), scope["path"]
        if not self._keys.are_needed:
            self._guard.check(scope["method"], headers)
            return self._keys.anonymous.admit()
        if not needs_key(path):
            return None
        key = self._keys.find(_token(headers))
        if key is None:
            raise ApiError(
                401,
                "a valid API key is needed, as `Authorization: Bearer <key>` or `x-api-key: <key>`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not key.entry.operator and is_for_operators(path):
            raise ApiError(403, f"{path} is for operators, which the API key {key.entry.name} is not")
        return key.admit()


def _token(headers: Headers) -> str:
    """Return the API key that the client gave."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    match error:
        case ApiError():
            return error
        case ClientDisconnect():
            return client_gone()
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
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
    given = Headers(scope=scope).get("x-request-id", "")
    if _REQUEST_ID.match(given):
        return given
    return secrets.token_hex(16)
