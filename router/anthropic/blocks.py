"""Builds an answer's content blocks as it arrives, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.answers.answer_parts import AnswerPart, CallStart, MoreArguments
from router.parsing.answer import Content, Reasoning
from router.templates.call_arguments import parsed_arguments

Fields = dict[str, Any]


class ContentBlocks:
    """The content blocks of one answer. All `blocks` are complete except the last one while it is open."""

    def __init__(self, signature: str) -> None:
        """`signature` is that of thinking blocks: clients send back only signed ones."""
        self.blocks: list[Fields] = []
        self._signature = signature
        self._is_open = False
        self._pieces: list[str] = []
        """The text or the arguments of the open block."""

    def push(self, part: AnswerPart) -> Iterator[Fields]:
        """Add a part of the answer and yield its events."""
        match part:
            case Content(text):
                yield from self._text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                yield from self._text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallStart(_, call_id, name):
                yield from self.close()
                yield self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case MoreArguments(_, text):
                yield self._more("input_json_delta", "partial_json", text)

    def close(self) -> Iterator[Fields]:
        """Close the open block and yield its last events."""
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        self._is_open, self._pieces = False, []
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self._signature
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _text(self, empty: Fields, text: str) -> Iterator[Fields]:
        kind = empty["type"]
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield self._open(empty)
        yield self._more(f"{kind}_delta", kind, text)

    def _open(self, block: Fields) -> Fields:
        self.blocks.append(block)
        self._is_open = True
        index = len(self.blocks) - 1
        return {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _more(self, kind: str, name: str, text: str) -> Fields:
        self._pieces.append(text)
        return self._delta({"type": kind, name: text})

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
