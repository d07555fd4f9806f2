"""Requests and adapters, in messages from the router to workers and between workers."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError
from protocol.fields import json_object, named_texts
from protocol.ids import Id, PeerAddress, Seconds, TokenIds
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES, Method, RequestSpeculation

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]

MAX_ADAPTERS = 4096
"""Most adapters of a deployment at one time."""
MAX_VARIABLES_BYTES = 4096
"""Most bytes of the chat template's variables for all requests, as JSON."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter: `name` is its name in requests, `path` its folder on each worker's host, `digest`
    identifies its content.

    KV depends on the content: adapters with the same content share KV, whatever their names.
    """

    name: AdapterName
    path: AdapterPath
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


def parse_lora_modules(value: object, flag: str) -> dict[str, str]:
    """Return absolute folders by name, from `sql=/adapters/sql,...`, a list of such texts, or a mapping."""
    found = named_texts(value, flag, "names with folders, as in sql=/adapters/sql")
    for name in found:
        if not 1 <= len(name) <= 256:
            raise ConfigError(f"{flag}: a name must have 1 to 256 characters, got {name[:300]!r}")
    if not 1 <= len(found) <= MAX_ADAPTERS:
        raise ConfigError(f"{flag}: must be from 1 to {MAX_ADAPTERS} adapters, got {len(found)}")
    return {name: str(Path(path).expanduser().absolute()) for name, path in found.items()}


def parse_template_variables(value: object, flag: str) -> dict[str, Any]:
    """Return the object in a JSON text, or a mapping as JSON has it. Raises `ConfigError`."""
    fields = json_object(value, flag, '{"enable_thinking": false}', "a JSON object")
    try:
        text = msgspec.json.encode(fields)
        variables: dict[str, Any] = msgspec.json.decode(text)
        msgspec.msgpack.encode(variables)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{flag}: must have JSON's values, integers up to 64 bits: {error}") from error
    if len(text) > MAX_VARIABLES_BYTES:
        raise ConfigError(f"{flag}: must have at most {MAX_VARIABLES_BYTES} bytes of JSON, got {len(text)}")
    return variables


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place where a request's drafts are made, and the most tokens of one draft.

    Without a method no drafts are made. Without `at` the decode worker drafts, otherwise the draft worker
    `at`.
    """

    method: Method | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TREE_NODES)] = MAX_TREE_NODES
    at: PeerAddress | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A lost worker has emitted `output_token_ids` already.

    Without a `draft_plan` the decode worker drafts as deployment and request say; the method `suffix` also
    drafts from the client's `prediction`. Steps with prefill chunks keep within `slo_tpot_s`, the time per
    output token that the client asked for.
    """

    request_id: Id
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: TokenIds = []
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    timeout_s: Seconds = 600.0
    slo_tpot_s: Annotated[float, Meta(gt=0)] = inf
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    adapter: Adapter | None = None
    speculation: RequestSpeculation | None = None
    prediction: TokenIds = []
    draft_plan: DraftPlan | None = None

    @property
    def tenant(self) -> tuple[str, str]:
        """Return salt and adapter: only requests that agree in both share KV."""
        return self.cache_salt, self.adapter.digest if self.adapter is not None else ""
