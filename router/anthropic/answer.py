"""Anthropic's messages, whole and as events. The model's output is parsed like a chat's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from router.answers.formats import Fields, OutputOptions, StreamedAnswer
from router.answers.parsed_chat import AnswerParts
from router.errors import ApiError, anthropic_body
from router.parsing.answer import Arguments, CallStart, Content, Part, Reasoning
from router.requests.slices import json_pieces
from router.text.chat_template import parsed_arguments
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode


class MessageAnswer(StreamedAnswer):
    """The writer of one answer."""

    def __init__(self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> None:
        message_id = f"msg_{request_id}"
        self._request_id = request_id
        self._parts = AnswerParts(options.parsing, message_id)
        self._content = ContentBlocks(message_id)
        self._has_begun = False
        self._message: Fields = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content.blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = {**self._message, "usage": _usage(choice)}
            yield _event({"type": "message_start", "message": message})
            yield _event({"type": "ping"})
        for event in self._parts.events(choice, self._content.push):
            yield b"" if event is None else _event(event)

    def last_chunk(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        yield from map(_event, self._content.close())
        ended = {"delta": self._ending(choices[0]), "usage": _usage(choices[0])}
        yield _event({"type": "message_delta", **ended, **timing})
        yield _event({"type": "message_stop"})

    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        for _ in self._parts.events(choices[0], self._content.push):
            yield b""
        for _ in self._content.close():
            yield b""
        about = {**self._ending(choices[0]), "usage": _usage(choices[0]), **timing}
        yield from json_pieces({**self._message, "content": iter(self._content.blocks), **about})

    def failed(self, choices: Sequence[Choice], error: ApiError) -> list[bytes]:
        return [anthropic_body(error, self._request_id)]

    def failure(self, error: ApiError) -> list[bytes]:
        return [b"event: error\ndata: " + anthropic_body(error, self._request_id) + b"\n\n"]

    def _ending(self, choice: Choice) -> Fields:
        reason, sequence = "tool_use" if self._parts.num_calls else "end_turn", None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(choice: Choice) -> Fields:
    """Return the usage so far. `input_tokens` do not include cached tokens."""
    return {
        "input_tokens": len(choice.prompt.token_ids) - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.num_tokens,
    }


def _event(fields: Fields) -> bytes:
    return b"event: " + fields["type"].encode() + b"\ndata: " + _json(fields) + b"\n\n"


class ContentBlocks:
    """The content blocks of one answer. All `blocks` are complete, except the last one while it is open."""

    def __init__(self, signature: str) -> None:
        """Initialize with the `signature` of thinking blocks: clients return only signed ones."""
        self.blocks: list[Fields] = []
        self._signature = signature
        self._is_open = False
        self._pieces: list[str] = []
        """Text or arguments of the open block, in pieces."""

    def push(self, part: Part) -> Iterator[Fields]:
        match part:
            case Content(text):
                yield from self._text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                yield from self._text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallStart(name, call_id):
                yield from self.close()
                yield self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(text):
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
