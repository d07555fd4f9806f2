"""The input items of stored responses, which clients read page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.responses.body import Item, ItemPart, ItemText
from router.responses.store import StoredResponse

MAX_PAGE = 100
Order = Literal["asc", "desc"]


class _Answered(msgspec.Struct):
    """The part of a response's body that tells how many items of its conversation are its own output."""

    output: list[Raw]


def page_of(response: StoredResponse, after: str | None, limit: int, order: Order) -> bytes:
    """Return a page of the items that the response answered, as JSON: of earlier responses', too.

    An item's id is made from its place, as clients may name none, or several alike. `after`: id of the item
    before the page. Raises `InvalidRequestError`.
    """
    items = _inputs(response)
    ids = [f"item_{response.id.partition('_')[2]}_{number}" for number in range(len(items))]
    rest = list(range(len(items)) if order == "asc" else reversed(range(len(items))))
    if after is not None:
        if after not in ids:
            raise InvalidRequestError("after", f"{after[:64]!r} is no input item of {response.id}")
        rest = rest[rest.index(ids.index(after)) + 1 :]
    shown = [{"id": ids[number], **_shown(items[number])} for number in rest[:limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    page = {"object": "list", "data": shown, "first_id": None, "last_id": None, **ends}
    return msgspec.json.encode({**page, "has_more": len(rest) > limit})


def _inputs(response: StoredResponse) -> Sequence[Raw]:
    items = msgspec.json.decode(response.items, type=list[Raw])
    own = msgspec.json.decode(response.body, type=_Answered).output
    return items[: len(items) - len(own)]


def _shown(raw: Raw) -> dict[str, Any]:
    """Return an item with the fields that OpenAI's clients require."""
    item = msgspec.json.decode(raw, type=Item)
    match item.type:
        case "message":
            part = "output_text" if item.role == "assistant" else "input_text"
            fields: dict[str, Any] = {"role": item.role, "content": _parts(item.content, part)}
        case "reasoning":
            fields = {"summary": item.summary or []}
            if item.content is not None:
                fields["content"] = _parts(item.content, "reasoning_text")
        case "function_call":
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case _:
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            fields = {"call_id": item.call_id, "output": output}
    return {"type": item.type, "status": item.status or "completed", **fields}


def _parts(content: ItemText | None, kind: str) -> list[dict[str, Any]]:
    """Return parts of the kind that belongs to the item, whatever kind of text its client sent."""
    parts = [ItemPart(type=kind, text=content)] if isinstance(content, str) else content or []
    details: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": (part.text or part.refusal or ""), **details} for part in parts]
