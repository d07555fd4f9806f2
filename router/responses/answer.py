"""Responses and their items, whole and as events. The output is parsed like a chat's answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from router.answers.formats import Fields, OutputOptions, StreamedAnswer, usage
from router.answers.parsed_chat import AnswerParts
from router.errors import ApiError
from router.parsing.answer import Arguments, CallStart, Content, Part, Reasoning
from router.requests.slices import json_pieces
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode
_PIECE = re.compile(r".{4096}\S{0,4096}|.+", re.DOTALL)
"""Matches a piece of a text, which ends at the end of a word."""


class ResponseAnswer(StreamedAnswer):
    """The writer of a response. `fields` repeat its request's. `store` keeps the response with its items, and
    returns whether it could.
    """

    def __init__(
        self,
        response_id: str,
        tokenizer: Tokenizer,
        options: OutputOptions,
        fields: Fields,
        store: Callable[[Fields], bool] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._streams = options.stream
        self._parts = AnswerParts(options.parsing, response_id)
        self._output = OutputItems(response_id)
        self._store = store
        self._num_events = 0
        self._response: Fields = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._output.items,
            "usage": None,
            **fields,
        }

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        if not self._num_events:
            yield self._status_event("created")
            yield self._status_event("in_progress")
        yield from self._encode(self._parts.events(choice, self._output.push))

    def completed(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        last = self._output.close(_status(choices))
        if self._streams:
            yield from self._encode(last)
        else:
            for _ in chain(self._parts.events(choices[0], self._output.push), last):
                yield b""
        yield from self._end(choices, timing)

    def last_chunk(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        yield self._status_event(self._response["status"])

    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        yield from json_pieces(self._response)

    def failed(self, choices: Sequence[Choice], error: ApiError) -> Iterator[bytes]:
        for _ in chain(self._parts.events(choices[0], self._output.push), self._output.close("incomplete")):
            yield b""
        yield from json_pieces({**self._response, "status": "failed", "error": error.detail})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield from self._encode(self._output.close("incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._status_event("failed")

    async def keep(self) -> None:
        if self._store is not None:
            self._response["store"] = await asyncio.to_thread(self._store, self._response)

    def _end(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        """Complete the response's fields. Yields b"" after each piece of a long text."""
        status, num_reasoning = _status(choices), 0
        for piece in self._reasoning():
            num_reasoning += len(self._tokenizer.encode(piece, add_special_tokens=False))
            yield b""
        self._response |= {"status": status, "usage": _usage(choices, num_reasoning), **timing}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}

    def _reasoning(self) -> Iterator[str]:
        """Yield the reasoning in pieces that end with a word, so that their token counts add up."""
        for item in self._output.items:
            if item["type"] == "reasoning":
                yield from _PIECE.findall(item["content"][0]["text"])

    def _status_event(self, status: str) -> bytes:
        return self._event({"type": f"response.{status}", "response": self._response})

    def _encode(self, events: Iterable[Fields | None]) -> Iterator[bytes]:
        return (b"" if event is None else self._event(event) for event in events)

    def _event(self, fields: Fields) -> bytes:
        body = _json({"sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + fields["type"].encode() + b"\ndata: " + body + b"\n\n"


def _status(choices: Sequence[Choice]) -> str:
    return "incomplete" if choices[0].finish_reason == "length" else "completed"


def _usage(choices: Sequence[Choice], num_reasoning: int) -> dict[str, Any]:
    """Return the usage. `num_reasoning`: number of tokens of the reasoning's text, tokenized again."""
    counted = usage(choices)
    num_prompt, num_cached = counted["prompt_tokens"], choices[0].cached_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": num_cached,
            "cache_write_tokens": num_prompt - num_cached,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": counted["total_tokens"],
    }


_TEXT_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The output items of one response. All `items` are complete, except the last one while it is open."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Fields] = []
        self._suffix = response_id.partition("_")[2]
        self._is_open = False
        self._pieces: list[str] = []
        """Text or arguments of the open item, in pieces."""

    def push(self, part: Part) -> Iterator[Fields]:
        match part:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallStart(name, call_id):
                yield from self.close("completed")
                yield self._open_item("function_call", {"call_id": call_id, "name": name, "arguments": ""})
            case Arguments(text):
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
            done = {"name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", done)
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
