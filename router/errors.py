"""The API's errors in the formats of OpenAI and Anthropic, with their status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from protocol.errors import TandemError
from protocol.outputs import ErrorKind
from router.placement.interface import Refusal

MAX_TEXT = 1024

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Types by status, where they differ from the type of the other 4xx or 5xx statuses."""

_KIND_STATUS: dict[ErrorKind, int] = {
    "invalid": 400,
    "overloaded": 503,
    "timeout": 504,
    "worker_lost": 502,
    "transfer": 502,
    "grammar": 422,
    "internal": 500,
}


_ANTHROPIC_TYPES = {"service_unavailable_error": "overloaded_error", "server_error": "api_error"}
"""Anthropic's names of error types, where they differ from OpenAI's."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error: its message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The body of every answer with a status other than 200."""

    error: ErrorDetail


class ApiError(TandemError):
    """An answer with a status other than 200. `param`: the request's field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _code(status)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def detail(self) -> ErrorDetail:
        return ErrorDetail(
            message=_cut(self.message),
            type=_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            param=self.param if self.param is None else _cut(self.param),
            code=self.code,
        )

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self, body: bytes | None = None) -> Response:
        """Return the response with this body, by default in OpenAI's format."""
        return Response(body or self.body(), self.status, self.headers, "application/json")


def speaks_anthropic(path: str) -> bool:
    """Return whether the endpoint's errors have Anthropic's format."""
    return path.startswith("/v1/messages")


def anthropic_body(error: ApiError, request_id: str) -> bytes:
    """Return an error in Anthropic's format, with OpenAI's field and code."""
    detail = error.detail
    kind = "request_too_large" if error.status == 413 else _ANTHROPIC_TYPES.get(detail.type, detail.type)
    about = msgspec.structs.replace(detail, type=kind)
    return msgspec.json.encode({"type": "error", "error": about, "request_id": request_id})


def _cut(text: str) -> str:
    """Shorten a message: it may contain names, fields or template errors that clients determine."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")


def too_long(field: str, reason: str) -> ApiError:
    """Return the error of a prompt that does not fit in the model's context with its answer."""
    return ApiError(400, f"{field}: {reason}", param=field, code="context_length_exceeded")


def client_gone() -> ApiError:
    """Return the error of a request whose client has gone. It is not sent; its status is counted."""
    return ApiError(499, "the client closed the connection", code="abort")


def unavailable(reason: str) -> ApiError:
    """Return the error of a request that no worker can take now, but perhaps soon."""
    return ApiError(503, reason, retry_after_s=1.0)


def not_placed(refusal: Refusal) -> ApiError:
    """Return 429 if a retry may succeed, 503 if no worker can serve the request."""
    status = 429 if refusal.waiting_helps else 503
    return ApiError(status, refusal.reason, code=refusal.missed, retry_after_s=refusal.retry_after_s)


def failed_generation(kind: ErrorKind, message: str) -> ApiError:
    """Return the error of a request that a worker or the router gave up."""
    retry_after_s = 1.0 if kind == "overloaded" else None
    return ApiError(_KIND_STATUS[kind], message, code=kind, retry_after_s=retry_after_s)
