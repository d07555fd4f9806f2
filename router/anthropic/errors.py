"""Errors in Anthropic's shape, with the field and the code of OpenAI's."""

from __future__ import annotations

import msgspec

from router.errors import ApiError

_TYPES = {"service_unavailable_error": "overloaded_error", "server_error": "api_error"}
"""Anthropic's names of types that have others in OpenAI's API."""


def speaks_anthropic(path: str) -> bool:
    """Return whether the endpoint's errors have Anthropic's shape."""
    return path.startswith("/v1/messages")


def error_body(error: ApiError, request_id: str) -> bytes:
    detail = error.detail
    kind = "request_too_large" if error.status == 413 else _TYPES.get(detail.type, detail.type)
    about = msgspec.structs.replace(detail, type=kind)
    return msgspec.json.encode({"type": "error", "error": about, "request_id": request_id})
