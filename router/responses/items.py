"""Builds a response's output items as the answer arrives, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.answers.answer_parts import AnswerPart, CallStart, MoreArguments
from router.parsing.answer import Content, Reasoning

Fields = dict[str, Any]
_TEXT_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The output items of one response. All `items` are complete except the last one while it is open."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Fields] = []
        self._suffix = response_id.partition("_")[2]
        self._is_open = False
        self._pieces: list[str] = []
        """The text or the arguments of the open item."""

    def push(self, part: AnswerPart) -> Iterator[Fields]:
        """Add a part of the answer and yield its events."""
        match part:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self.close("completed")
                yield self._open_item("function_call", {"call_id": call_id, "name": name, "arguments": ""})
            case MoreArguments(_, text):
                self._pieces.append(text)
                yield self._event("response.function_call_arguments.delta", {"delta": text})

    def close(self, status: str) -> Iterator[Fields]:
        """Close the open item and yield its last events."""
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._pieces)
        self._is_open, self._pieces = False, []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event(
                "response.function_call_arguments.done", {"name": item["name"], "arguments": text}
            )
        else:
            kind = _TEXT_KINDS[item["type"]]
            item["content"] = [_text_part(kind, text)]
            yield self._text_event(kind, "done", {"text": text})
            yield self._event("response.content_part.done", {"content_index": 0, "part": item["content"][0]})
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _text(self, item_type: str, text: str) -> Iterator[Fields]:
        kind = _TEXT_KINDS[item_type]
        if not self._is_open or self.items[-1]["type"] != item_type:
            yield from self.close("completed")
            role: Fields = {"role": "assistant"} if item_type == "message" else {"summary": []}
            yield self._open_item(item_type, {**role, "content": []})
            part = {"content_index": 0, "part": _text_part(kind, "")}
            yield self._event("response.content_part.added", part)
        self._pieces.append(text)
        yield self._text_event(kind, "delta", {"delta": text})

    def _open_item(self, item_type: str, fields: Fields) -> Fields:
        item_id = f"{_PREFIXES[item_type]}_{self._suffix}{len(self.items)}"
        item = {"id": item_id, "type": item_type, "status": "in_progress", **fields}
        self.items.append(item)
        self._is_open = True
        index = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _text_event(self, kind: str, what: str, fields: Fields) -> Fields:
        details: Fields = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"response.{kind}.{what}", {"content_index": 0, **fields, **details})

    def _event(self, event_type: str, fields: Fields) -> Fields:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": event_type, **place, **fields}


def _text_part(kind: str, text: str) -> Fields:
    details: Fields = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **details}
