"""Reading of request bodies and decoding of their JSON into types. An `ApiError` names the bad field."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Raw
from starlette.requests import Request

from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.openai_types import (
    MAX_RAW_BYTES,
    GenerationBody,
    Unsupported,
)

T = TypeVar("T", bound=msgspec.Struct)

MAX_HARMLESS_BYTES = 64
MAX_IGNORED, MAX_NAME = 16, 64
"""Most ignored fields that an answer names, and most characters of each name."""
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
_INDEX = re.compile(r"\[\d+\]")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": ([],),
    "echo": (False,),
    "logits_processors": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
}
"""Values, by name, of unsupported fields that would change nothing."""
_UNSEEN = {"annotations", "cache_control", "caller", "citations", "data", "encrypted_content", "id", "index"}
_UNSEEN |= {"logprobs", "signature"}
"""Fields within messages and tools that clients send and no model sees."""

_INSTEAD = {
    name: f"is not supported; use {own}"
    for name, own in {
        "stop": "stop_sequences",
        "json_schema": "structured_outputs.json",
        "regex": "structured_outputs.regex",
        "ebnf": "structured_outputs.grammar",
        "grammar": "structured_outputs.grammar",
        **{
            f"guided_{kind}": f"structured_outputs.{kind}"
            for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
        },
    }.items()
}

_LIST_START = re.compile(rb"\[\s*(.)")
_AT = re.compile(r" - at (`key` in )?`\$\.?(.*?)`$")


def decode_body(raw: bytes, body_type: type[T]) -> T:
    """Decode a body. Raises `ApiError`, also for text that is not JSON."""
    return _decoded(raw, body_type, "")


def ignored_fields(raw: bytes, body_type: type[msgspec.Struct]) -> list[str]:
    """Return the names of the fields of a valid body that its type does not have, fit for a header.

    Fields of inner objects are named by their path. Each is named once, unless no model would see its value.
    """
    found: dict[str, str] = {}
    """Paths with indices, by the same paths without indices."""
    structs = _structs(body_type)
    for name, value in msgspec.json.decode(raw, type=dict[str, Raw]).items():
        if name not in structs:
            found[name] = _safe(name)
        elif (struct := structs[name]) is not None:
            for path in _unknown(msgspec.json.decode(value), struct, name):
                found.setdefault(_INDEX.sub("", path), path)
        if len(found) >= MAX_IGNORED:
            break
    return list(found.values())[:MAX_IGNORED]


def _unknown(value: Any, struct: type[msgspec.Struct], at: str) -> Iterator[str]:
    """Yield the paths of fields that an object, or an object in a list, has and its type has not."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unknown(each, struct, f"{at}[{index}]")
    elif isinstance(value, dict):
        structs = _structs(struct)
        for name, each in value.items():
            if name not in structs:
                if each and name not in _UNSEEN:
                    yield f"{at}.{_safe(name)}"
            elif (within := structs[name]) is not None:
                yield from _unknown(each, within, f"{at}.{name}")


@cache
def _structs(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Return the struct that each field's value, or its items, may be, by field name; None: no struct."""
    return {field.name: _struct_in(field.type) for field in msgspec.structs.fields(struct)}


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(_struct_in, get_args(kind))), None)


def _safe(name: str) -> str:
    return _UNSAFE.sub("?", name[:MAX_NAME])


def decode_field(raw: Raw | bytes, field: str, kind: Any) -> Any:
    """Decode a field that was kept as JSON text. Return None if it is absent or null."""
    return _decoded(bytes(raw) or b"null", kind | None, field)


def decode_object(raw: Raw | bytes, field: str) -> dict[str, Any] | None:
    """Decode a field with a free-form object of at most `MAX_RAW_BYTES` of JSON."""
    if len(bytes(raw)) > MAX_RAW_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_RAW_BYTES} bytes of JSON")
    fields: dict[str, Any] | None = decode_field(raw, field, dict[str, Any])
    return fields


def decode_prompts(
    raw: bytes, check_number: Callable[[int], object], field: str = "prompt"
) -> list[str] | list[list[int]]:
    """Decode a text, a list of token ids, or a list of either.

    Prompts are counted in the JSON text, so that a million lists are refused before they are created.
    """
    start = _LIST_START.match(raw)
    prompts: list[str] | list[list[int]]
    if start is not None and start[1] == b'"':
        plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        check_number(plain.count(b'"') // 2)
        prompts = decode_field(raw, field, list[str])
    elif start is not None and start[1] == b"[":
        check_number(raw.count(b"[") - 1)
        prompts = decode_field(raw, field, list[list[int]])
    else:
        check_number(1)
        prompts = [decode_field(raw, field, str if start is None else list[int])]
    if prompts == [None]:
        raise InvalidRequestError(field, "is required")
    return prompts


def refuse_unsupported(body: msgspec.Struct, at: str = "") -> None:
    """Raise `InvalidRequestError` for the first field that asks for an unsupported feature."""
    for name in _unsupported(type(body)):
        raw = bytes(getattr(body, name))
        if raw and not _is_harmless(name, raw, body):
            raise InvalidRequestError(at + name, _INSTEAD.get(name, "is not supported"))


@cache
def _unsupported(body: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(body) if field.type is Unsupported)


def _is_harmless(name: str, raw: bytes, body: msgspec.Struct) -> bool:
    if len(raw) > MAX_HARMLESS_BYTES:
        return False
    value = _decoded(raw, Any, name)
    if name == "best_of" and isinstance(body, GenerationBody) and value == (body.n or 1):
        return True
    return value is None or value in _HARMLESS.get(name, ())


def _decoded(raw: bytes, kind: Any, field: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _syntax_error(raw, error, field) from error


def _type_error(text: str, field: str) -> ApiError:
    reason = _AT.sub("", text).replace("`", "")
    match = _AT.search(text)
    path = match.group(2) if match else ""
    if missing := re.search(r"missing required field (\w+)", reason):
        path, reason = f"{path}.{missing.group(1)}".strip("."), "is required"
    param = f"{field}.{path}".strip(".").replace(".[", "[") or None
    reason = reason[0].lower() + reason[1:]
    return ApiError(400, f"{param or 'body'}: {reason}", param=param, code="invalid_type")


def _syntax_error(raw: bytes, error: Exception, field: str) -> ApiError:
    non_finite = _non_finite_field(raw)
    if non_finite is not None:
        return ApiError(400, f"{non_finite}: must be a finite number", param=non_finite, code="invalid_value")
    message = f"{field or 'the body'} is not valid JSON: {error}"
    return ApiError(400, message, param=field or None, code="invalid_json")


def _non_finite_field(raw: bytes) -> str | None:
    """Return the name of a field with NaN or Infinity, which Python's own parser accepts, if any."""
    try:
        body = json.loads(raw) if len(raw) <= MAX_RAW_BYTES else None
        fields = body.items() if isinstance(body, dict) else ()
        return next((str(name) for name, value in fields if not _is_finite(value)), None)
    except (ValueError, RecursionError):
        return None


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


BODY_TIMEOUT_S = 20.0
MIN_BYTES_PER_S = 64 * 1024
"""[bytes/s] Slowest accepted rate: received bytes extend the time limit by their time at this rate."""
SMALL_BYTES = 64 * 1024
"""Largest body of an operator's request, which is decoded in the event loop."""
_PLAIN = "identity"
"""The only content encoding of bodies that are read."""
MAX_BODIES = 16
"""Number of largest bodies that fit in memory at once."""


class PendingBodies:
    """The bodies that are being read or decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Read the whole body and yield it. It counts against the memory limit until the context ends.

        `max_bytes` lowers the limit for a body that is decoded in the event loop. Raises `ApiError` 413 if
        the body is too large, 503 if all bodies together are, 408 if it is late; and `ClientDisconnect`.
        """
        parts: list[bytes] = []
        try:
            most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
            await self._read_in_time(request, parts, most)
            yield b"".join(parts)
        finally:
            self._held -= sum(map(len, parts))

    async def _read_in_time(self, request: Request, parts: list[bytes], most: int) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                await self._read(request, parts, most, limit)
        except TimeoutError:
            rate = f"and a second more for each {MIN_BYTES_PER_S} bytes"
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s, {rate}") from None

    async def _read(self, request: Request, parts: list[bytes], most: int, limit: asyncio.Timeout) -> None:
        encoding = request.headers.get("content-encoding", _PLAIN)
        if encoding.lower() != _PLAIN:
            message = f"content-encoding: {encoding[:64]!r} is not supported: send the body as it is"
            raise ApiError(415, message, param="content-encoding", headers={"accept-encoding": _PLAIN})
        if int(request.headers.get("content-length", 0)) > most:
            raise self._too_large(most)
        received = 0
        async for part in request.stream():
            received += len(part)
            if received > most:
                raise self._too_large(most)
            if self._held + len(part) > MAX_BODIES * self._max_bytes:
                raise ApiError(503, "too many request bodies at once", retry_after_s=1.0)
            parts.append(part)
            self._held += len(part)
            limit.reschedule((limit.when() or 0.0) + len(part) / MIN_BYTES_PER_S)

    def _too_large(self, most: int) -> ApiError:
        flag = " (--max-body-bytes)" if most == self._max_bytes else ""
        return ApiError(413, f"the body exceeds the limit of {most} bytes{flag}")
