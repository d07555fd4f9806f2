"""Writes Anthropic's messages, whole and as events. The model's output is parsed like a chat's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from router.answers.formats import OutputOptions, StreamedAnswer
from router.answers.parsed_chat import AnswerParts
from router.anthropic.conversation import ContentBlocks, Fields
from router.errors import ApiError, anthropic_body
from router.observe.timing import ResponseTiming
from router.requests.slices import json_pieces
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode


class MessageAnswer(StreamedAnswer):
    """Writes one answer."""

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
        for event in self._new_events(choice):
            yield b"" if event is None else _event(event)

    def last_chunk(self, choices: Sequence[Choice], timing: ResponseTiming | None = None) -> Iterator[bytes]:
        yield from map(_event, self._content.close())
        ended = {"delta": self._ending(choices[0]), "usage": _usage(choices[0])}
        yield _event({"type": "message_delta", **ended, **_timed(timing)})
        yield _event({"type": "message_stop"})

    def response(self, choices: Sequence[Choice], timing: ResponseTiming | None = None) -> Iterator[bytes]:
        for _ in self._new_events(choices[0]):
            yield b""
        for _ in self._content.close():
            yield b""
        about = {**self._ending(choices[0]), "usage": _usage(choices[0]), **_timed(timing)}
        yield from json_pieces({**self._message, "content": iter(self._content.blocks), **about})

    def failed(self, choices: Sequence[Choice], error: ApiError) -> list[bytes]:
        return [anthropic_body(error, self._request_id)]

    def failure(self, error: ApiError) -> list[bytes]:
        return [b"event: error\ndata: " + anthropic_body(error, self._request_id) + b"\n\n"]

    def _new_events(self, choice: Choice) -> Iterator[Fields | None]:
        """Events; None after each piece of a long text."""
        for parts in self._parts.push(choice, choice.take_text()):
            for part in parts:
                yield from self._content.push(part)
            yield None

    def _ending(self, choice: Choice) -> Fields:
        reason, sequence = "tool_use" if self._parts.num_calls else "end_turn", None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(choice: Choice) -> Fields:
    """Return the usage so far. Cached tokens are no part of `input_tokens`."""
    return {
        "input_tokens": len(choice.prompt.token_ids) - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.num_tokens,
    }


def _timed(timing: ResponseTiming | None) -> Fields:
    return {} if timing is None else {"timing": timing}


def _event(fields: Fields) -> bytes:
    return b"event: " + fields["type"].encode() + b"\ndata: " + _json(fields) + b"\n\n"
