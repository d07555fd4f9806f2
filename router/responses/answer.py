"""Writes responses, whole and as events. The model's output is parsed like a chat's answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from router.answer_parts import AnswerParts
from router.choice import Choice
from router.errors import ApiError
from router.formats import OutputOptions, StreamedAnswer, usage
from router.responses.items import Fields, OutputItems
from router.timing import ResponseTiming
from router.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode


class ResponseAnswer(StreamedAnswer):
    """`fields` are the response's fields that repeat its request; `store` keeps the response and its
    items.
    """

    def __init__(
        self,
        response_id: str,
        tokenizer: Tokenizer,
        options: OutputOptions,
        fields: Fields,
        store: Callable[[Fields], None] | None,
    ) -> None:
        self._tokenizer = tokenizer
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

    def chunk(self, choice: Choice) -> bytes:
        start = b"" if self._num_events else self._status_event("created") + self._status_event("in_progress")
        return start + self._encode(self._new_events(choice))

    def last_chunk(self, choices: Sequence[Choice], timing: ResponseTiming | None = None) -> bytes:
        events = self._encode(self._closing_events(choices, timing))
        return events + self._status_event(self._response["status"])

    def response(self, choices: Sequence[Choice], timing: ResponseTiming | None = None) -> bytes:
        for events in (self._new_events(choices[0]), self._closing_events(choices, timing)):
            deque(events, maxlen=0)
        return _json(self._response)

    def failed(self, choices: Sequence[Choice], error: ApiError) -> bytes:
        for events in (self._new_events(choices[0]), self._output.close("incomplete")):
            deque(events, maxlen=0)
        return _json({**self._response, "status": "failed", "error": error.detail})

    def failure(self, error: ApiError) -> bytes:
        events = self._encode(self._output.close("incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return events + self._status_event("failed")

    async def keep(self) -> None:
        if self._store is not None:
            await asyncio.to_thread(self._store, self._response)

    def _new_events(self, choice: Choice) -> Iterator[Fields]:
        for part in self._parts.push(choice, choice.take_text()):
            yield from self._output.push(part)

    def _closing_events(self, choices: Sequence[Choice], timing: ResponseTiming | None) -> Iterator[Fields]:
        is_cut = choices[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._output.close(status)
        self._response |= {"status": status, "usage": self._usage(choices)}
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        if timing is not None:
            self._response["timing"] = timing

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        counted = usage(choices)
        num_prompt, num_cached = counted["prompt_tokens"], choices[0].cached_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_prompt - num_cached,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": counted["total_tokens"],
        }

    def _num_reasoning_tokens(self) -> int:
        """Return how many tokens the tokenizer makes of the reasoning's text."""
        texts = [item["content"][0]["text"] for item in self._output.items if item["type"] == "reasoning"]
        return sum(len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def _status_event(self, status: str) -> bytes:
        return self._event({"type": f"response.{status}", "response": self._response})

    def _encode(self, events: Iterator[Fields]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, fields: Fields) -> bytes:
        body = _json({"sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + fields["type"].encode() + b"\ndata: " + body + b"\n\n"
