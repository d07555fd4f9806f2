"""A client that sends one completion request and records when each piece of its answer arrived."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.serve.http import Endpoint, HttpError, exchange
from bench.serve.workload import LoadRequest


class CompletionDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class CompletionChoice(msgspec.Struct):
    text: str | None = None
    delta: CompletionDelta | None = None
    finish_reason: str | None = None

    def bears_tokens(self) -> bool:
        """Return whether this piece has generated tokens.

        A completion's piece may have empty text if it ends within a character. A chat's first piece has only
        the role, and its last one may have only the finish reason.
        """
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content)
        return bool(self.text) or self.finish_reason is None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CompletionEvent(msgspec.Struct):
    """One SSE event of a streamed completion."""

    choices: list[CompletionChoice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Record:
    """The outcome of one request. Times are seconds on the load generator's monotonic clock.

    `error` is empty for a completed request, else the kind of failure, with details in `detail`.
    """

    start: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The server that gets the requests, and their parameters other than prompt and length."""

    base_url: str
    model: str
    chat: bool = False
    ignore_eos: bool = False
    temperature: float = 0.0
    api_key: str | None = None
    timeout: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def endpoint(self) -> Endpoint:
        """Return the parsed `base_url`. Raises ValueError if it is no http or https URL."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        return Endpoint.parse(self.base_url.rstrip("/").removesuffix("/v1") + path)

    def body(self, request: LoadRequest) -> bytes:
        """Return the JSON body of one request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            if not isinstance(request.prompt, str):
                raise ValueError("--chat needs text prompts: give them with --prompt-file")
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if request.salt:
            fields["cache_salt"] = request.salt
        return msgspec.json.encode(fields | self.extra_body)


class EventStream:
    """A parser that splits a body into server-sent events and records their contents."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._buffer = b""
        self._decoder = msgspec.json.Decoder(CompletionEvent)
        self.finished = False
        self.finished_at = 0.0

    def feed(self, data: bytes) -> None:
        """Parse body bytes. Raises msgspec.DecodeError if an event is malformed."""
        now = time.perf_counter()
        *events, self._buffer = (self._buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue
            payload = event[5:].strip()
            if payload == b"[DONE]":
                self.finished = True
            else:
                self._take(self._decoder.decode(payload), now)

    def _take(self, piece: CompletionEvent, now: float) -> None:
        record = self._record
        if piece.error is not None:
            record.error, record.detail = "error event", str(piece.error)[:200]
        if piece.usage is not None:
            record.prompt_tokens = piece.usage.prompt_tokens
            record.output_tokens = piece.usage.completion_tokens
        if any(choice.finish_reason is not None for choice in piece.choices):
            self.finished, self.finished_at = True, now
        if any(choice.bears_tokens() for choice in piece.choices):
            record.token_times.append(now)


class Client:
    """A client of one target."""

    def __init__(self, target: ServerTarget) -> None:
        self._target = target
        self._endpoint = target.endpoint()
        self._tls = ssl.create_default_context() if self._endpoint.tls else None
        self._headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}

    async def send(self, request: LoadRequest) -> Record:
        """Send one request and wait for its end. Failures are recorded, not raised."""
        record = Record(prompt_tokens=0 if isinstance(request.prompt, str) else len(request.prompt))
        message = self._endpoint.request("POST", self._target.body(request), self._headers)
        stream = EventStream(record)
        refusal = bytearray()

        def on_body(status: int, data: bytes) -> None:
            if status == 200:
                stream.feed(data)
            else:
                refusal.extend(data)

        record.start = time.perf_counter()
        try:
            async with asyncio.timeout(self._target.timeout):
                status = await exchange(self._endpoint, message, on_body, self._tls)
        except TimeoutError:
            record.error = "timeout"
        except HttpError as error:
            record.error, record.detail = "broken stream", str(error)
        except msgspec.DecodeError as error:
            record.error, record.detail = "bad event", str(error)
        except OSError as error:
            record.error, record.detail = "no connection", str(error)
        else:
            if status != 200:
                record.error, record.detail = f"HTTP {status}", refusal.decode("utf-8", "replace")[:200]
            elif not record.error and not stream.finished:
                record.error, record.detail = "broken stream", "no finish reason and no [DONE]"
        record.end = time.perf_counter()
        if record.output_tokens and not record.token_times and stream.finished_at:
            record.token_times.append(stream.finished_at)  # its only text is part of a character, or empty
        record.output_tokens = record.output_tokens or len(record.token_times)
        if not record.error and not record.token_times:
            record.error, record.detail = "no tokens", "the answer ended without any"
        return record
