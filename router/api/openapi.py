"""`/openapi.json`: describes every endpoint and every field of the typed request bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from protocol.version import version
from router.errors import ErrorBody
from router.middleware import needs_key

_REF = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """One endpoint, with its description. `answer` describes the body of a 200."""

    path: str
    endpoint: Any
    summary: str
    answer: str
    body: type[msgspec.Struct] | None = None
    deletes: bool = False
    aliases: tuple[str, ...] = ()
    """Further paths that are not described."""

    @property
    def method(self) -> str:
        if self.deletes:
            return "DELETE"
        return "GET" if self.body is None else "POST"


def openapi(operations: Sequence[Operation], has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    bodies = [each.body for each in operations if each.body is not None]
    _, schemas = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=_REF)
    paths: dict[str, Any] = {}
    for each in operations:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _described(each, path, has_keys)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version(),
            "description": "OpenAI's API with vLLM's extensions, and Anthropic's messages.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, path: str, has_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.answer},
            "default": {"description": "The error", "content": _json_of(ErrorBody)},
        },
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json_of(operation.body)}
    if has_keys and needs_key(path):
        described["security"] = [{"bearer": []}]
    return described


def _json_of(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
