"""A request's constraints on its answer, as data from which a grammar is made later."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.openai_types import GenerationBody, ResponseFormat, StructuredOutputs, Tool


class Calls(msgspec.Struct, frozen=True):
    """Constrains calls to `tools`, or to the one with this `name`, with arguments of their schemas."""

    tools: list[Tool]
    must_call: bool
    several: bool
    name: str | None = None


class AskedGrammar(msgspec.Struct, frozen=True):
    """A `GrammarRequest` as JSON, and the field of the client's request that asks for it."""

    field: str
    request: bytes


class GrammarRequest(msgspec.Struct, frozen=True):
    """The constraints on one answer. `is_open`: the prompt has begun the thinking; None: there is none."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    calls: Calls | None = None
    is_open: bool | None = None

    @property
    def field(self) -> str:
        """Return the client's field that asks for the grammar."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "tools" if self.response_format is None else "response_format"

    def asked(self) -> AskedGrammar:
        return AskedGrammar(self.field, msgspec.json.encode(_given(self)))


def grammar_request(
    body: GenerationBody, calls: Calls | None = None, is_open: bool | None = None
) -> GrammarRequest | None:
    """Return the constraints on the answer, None if any text is allowed."""
    wanted = body.response_format
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is None and body.structured_outputs is None and calls is None:
        return None
    return GrammarRequest(wanted, body.structured_outputs, calls, is_open)


def asked_grammar(
    body: GenerationBody, calls: Calls | None = None, is_open: bool | None = None
) -> AskedGrammar | None:
    request = grammar_request(body, calls, is_open)
    return None if request is None else request.asked()


def _given(value: Any) -> Any:
    """Drop the fields that were not given: an empty `Raw` is not JSON."""
    if isinstance(value, list):
        return [_given(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return {name: _given(each) for name, each in fields.items() if each is not None and each != Raw()}
