"""Endpoints that generate, such as `POST /v1/chat/completions`, and the sending of their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import msgspec
from fastapi import FastAPI, params
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import InvalidRequestError
from router.answers.formats import AnswerWriter, CompletionFormat, Fields, OutputOptions, StreamedAnswer
from router.answers.parsed_chat import chat_format
from router.anthropic.answer import MessageAnswer
from router.anthropic.request import MessageBody
from router.anthropic.request import own_field as message_field
from router.api.access import admit, posted
from router.api_keys import Admission
from router.connection import DIRECT_WRITER, DirectWriter
from router.errors import ApiError
from router.middleware import ANSWER_HEADERS, REQUEST_ID_KEY
from router.observe.timing import response_timing
from router.openai_types import ChatBody, CompletionBody
from router.pooling import (
    EmbeddingAnswer,
    EmbeddingBody,
    RankingAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
)
from router.reading.prepared import EarlierResponse, Prepared
from router.requests.journal import Generation
from router.requests.slices import Slices
from router.responses.body import ResponseBody
from router.responses.request import earlier_items, response_answer
from router.responses.request import own_field as response_field
from router.state import RouterState
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer

SESSION_HEADER = "x-session-id"
TIMING_HEADER = "x-return-timing"
MAX_SESSION_CHARS = 256
WARNING_HEADER, IGNORED_HEADER = b"x-warning", b"x-tandem-ignored-fields"
TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
_STREAM = ", or with `stream` server-sent events"
_EMBEDDINGS = "`data` of `embedding`, `usage`"
_RANKING = "`results` of `index`, `relevance_score` and `document`, best first, `usage`"


MakeWriter = Callable[[Prepared, str, Tokenizer, str, str, OutputOptions], AnswerWriter]
"""A factory of an answer's writer, for the API key of this name."""


@dataclass(frozen=True)
class GenerateEndpoint:
    """An ASGI app. `task`: how bodies are read; `own_field`: this API's name for a field of a chat."""

    state: RouterState
    task: str
    answer: MakeWriter
    own_field: Callable[[str], str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with admit(self.state, scope) as admission:
            await self._serve(admission, scope, receive, send)

    async def _serve(self, admission: Admission, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request until its client goes away. Raises `ApiError` before the answer has begun."""
        arrival = time.monotonic()
        state, owner = self.state, admission.key.entry.name
        admission.key.check_tokens()
        async with state.bodies.read(Request(scope, receive)) as raw:
            prepared = await self._prepared(raw, owner)
            generation = await state.requests.build(prepared, arrival)
        admission.reserve(generation)
        if prepared.grammar is not None:
            try:
                generation.constrain(await state.grammars.compile(prepared.grammar))
            except InvalidRequestError as refused:
                raise InvalidRequestError(self.own_field(refused.field), refused.message) from refused
        if prepared.warning is not None:
            scope[ANSWER_HEADERS].append((WARNING_HEADER, prepared.warning.encode()))
            state.metrics.count("requests_tools_unseen_total")
        if prepared.ignored:
            scope[ANSWER_HEADERS].append((IGNORED_HEADER, ", ".join(prepared.ignored).encode()))
            state.metrics.count("requests_fields_ignored_total")
        headers = _headers(scope)
        generation.http_id = scope[REQUEST_ID_KEY]
        generation.session = _session(headers)
        if not state.keys.are_needed and scope["client"] is not None:
            generation.client = scope["client"][0]
        generation.slo_ttft_s = _slo(headers, TTFT_HEADER, state.config.slo_ttft)
        generation.slo_tpot_s = _slo(headers, TPOT_HEADER, state.config.slo_tpot)
        output = prepared.output
        if _wants_timing(headers) or output.return_timing:
            output = msgspec.structs.replace(output, return_timing=True)
            for choice in generation.choices:
                choice.keep_spans = True
        adapter = generation.adapter
        name = state.config.model_name if adapter is None else adapter.name
        answer = self.answer(prepared, owner, state.tokenizer, name, generation.http_id, output)
        trace = None
        if state.tracing is not None:
            trace = state.tracing.start_trace(headers, arrival)
            scope[ANSWER_HEADERS].append((b"traceparent", trace.traceparent))
        watcher = asyncio.ensure_future(_disconnected(receive))
        watcher.add_done_callback(lambda _: state.dispatcher.cancel(generation))
        try:
            await state.dispatcher.start(generation)
            while not generation.is_over:
                await generation.wait()
                if output.stream:
                    break
            sender = AnswerSender(send, state.slices, output.return_timing, watcher.done)
            if output.stream and generation.error is None:
                assert isinstance(answer, StreamedAnswer)
                await sender.stream(generation, answer, scope.get("state", {}).get(DIRECT_WRITER))
            else:
                await sender.whole(generation, answer)
        finally:
            watcher.cancel()
            state.dispatcher.cancel(generation)
            if trace is not None:
                trace.end(generation, generation.http_id)

    async def _prepared(self, raw: bytes, owner: str) -> Prepared:
        """Read a body, and the stored response that it continues. Raises `ApiError` that names the field."""
        state, model = self.state, self.state.require_served()
        read = await state.requests.read(self.task, raw, model)
        if isinstance(read, EarlierResponse):
            items = await earlier_items(state.responses, read.response_id, owner)
            read = await state.requests.read(self.task, raw, model, items)
        assert isinstance(read, Prepared)
        return read


class GenerateRoute(APIRoute):
    """A route that calls its ASGI app directly: FastAPI solves no dependencies and builds no response."""

    def __init__(self, path: str, endpoint: ASGIApp, **options: Any) -> None:
        async def described() -> Response:
            raise NotImplementedError

        super().__init__(path, described, **options)
        self.app = endpoint


def add_routes(app: FastAPI, state: RouterState, key: Sequence[params.Depends]) -> None:
    """Add the endpoints that generate. They come first, since routes are tried in order."""

    def add(
        body: type[msgspec.Struct],
        described: str,
        task: str,
        answer: MakeWriter,
        *paths: str,
        own_field: Callable[[str], str] = str,
    ) -> None:
        endpoint = GenerateEndpoint(state, task, answer, own_field)
        for path in paths:
            app.router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                dependencies=key,
                include_in_schema=path == paths[0],
                operation_id=path,
                route_class_override=GenerateRoute,
                **posted(body, described),
            )

    add(CompletionBody, f"JSON{_STREAM}", "completion", _writer_of(CompletionFormat), "/v1/completions")
    add(ChatBody, f"JSON{_STREAM}", "chat", _writer_of(chat_format), "/v1/chat/completions")
    response, message = partial(response_answer, state.responses), _writer_of(MessageAnswer)
    shown = f"OpenAI's response{_STREAM}", f"Anthropic's message{_STREAM}"
    add(ResponseBody, shown[0], "response", response, "/v1/responses", own_field=response_field)
    add(MessageBody, shown[1], "message", message, "/v1/messages", own_field=message_field)
    add(EmbeddingBody, _EMBEDDINGS, "embeddings", _pooled(EmbeddingAnswer), "/v1/embeddings")
    add(ScoreBody, "`data` of `score`, `usage`", "score", _pooled(ScoreAnswer), "/score", "/v1/score")
    add(RerankBody, _RANKING, "ranking", _pooled(RankingAnswer), "/v1/rerank", "/v2/rerank", "/rerank")


def _writer_of(write: Callable[[Tokenizer, str, str, OutputOptions], AnswerWriter]) -> MakeWriter:
    return lambda prepared, owner, *output: write(*output)


def _pooled(write: Callable[[Prepared, str, str], AnswerWriter]) -> MakeWriter:
    return lambda prepared, owner, tokenizer, model, request_id, options: write(prepared, model, request_id)


def _headers(scope: Scope) -> Mapping[str, str]:
    """Return the headers as a dictionary: `Headers` would search all headers at each look-up."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _session(headers: Mapping[str, str]) -> str:
    """Return the client's name of the conversation, whose requests go to the same worker if possible."""
    session = headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION_CHARS:
        raise _bad_header(SESSION_HEADER, f"at most {MAX_SESSION_CHARS} characters, got {len(session)}")
    return session


def _wants_timing(headers: Mapping[str, str]) -> bool:
    value = headers.get(TIMING_HEADER)
    if value is None:
        return False
    if value.lower() not in ("true", "false"):
        raise _bad_header(TIMING_HEADER, f"must be true or false, got {value[:64]!r}")
    return value.lower() == "true"


def _slo(headers: Mapping[str, str], header: str, default_s: float | None) -> float:
    """Return the SLO [s] that the client asks for, else the server's default, else infinity."""
    value = headers.get(header)
    if value is None:
        return inf if default_s is None else default_s
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < inf:
        raise _bad_header(header, f"must be a positive number of milliseconds, got {value[:64]!r}")
    return milliseconds / 1000


def _bad_header(header: str, reason: str) -> ApiError:
    return ApiError(400, f"{header}: {reason}", param=header, code="invalid_value")


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone or the answer is complete. Call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


Ending = Callable[[Sequence[Choice], Fields], Iterable[bytes]]
"""A writer of the end of an answer."""
PART_BYTES = 64 * 1024
"""Size of the parts of an answer. A shorter answer has a content length."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerSender:
    """The sender of one answer. Long answers are sent in parts while they are written, until `is_gone()`."""

    def __init__(self, send: Send, slices: Slices, with_timing: bool, is_gone: Callable[[], bool]) -> None:
        self._send = send
        self._slices = slices
        self._with_timing = with_timing
        self._is_gone = is_gone
        self._start: Message | None = None
        """The headers, until they are sent with the first part."""

    async def whole(self, generation: Generation, answer: AnswerWriter) -> None:
        """Send JSON once the generation is over."""
        headers = [(b"content-type", b"application/json")]
        if (error := generation.error) is not None:
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
            self._start = _start(error.status, headers)
            await self._put(answer.failed(generation.choices, error), is_last=True)
            return
        self._start = _start(200, headers)
        await self._put(*self._ending(generation, answer, answer.response), is_last=True, keep=answer.keep)

    async def stream(
        self, generation: Generation, answer: StreamedAnswer, direct: DirectWriter | None
    ) -> None:
        """Send server-sent events as output comes. `send` waits while the client does not read."""
        await self._send(_start(200, list(_STREAM_HEADERS)))
        write = None if direct is None else _writer(generation, answer, direct)
        while not generation.is_over:
            await self._put(_news(generation, answer))
            await generation.wait(write)
        news = _news(generation, answer)
        if generation.error is not None:
            await self._put(chain(news, answer.failure(generation.error)), is_last=True)
            return
        completed, last = self._ending(generation, answer, answer.last_chunk)
        await self._put(chain(news, completed), last, is_last=True, keep=answer.keep)

    def _ending(self, generation: Generation, answer: AnswerWriter, last: Ending) -> list[Iterable[bytes]]:
        """Return the answer's parts before and after it is kept."""
        timing = response_timing(generation) if self._with_timing else {}
        return [write(generation.choices, timing) for write in (answer.completed, last)]

    async def _put(
        self,
        *stages: Iterable[bytes],
        is_last: bool = False,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Send the pieces of all stages in parts. `keep` is awaited before the last stage begins."""
        body = b""
        for stage in stages:
            if keep is not None and stage is stages[-1]:
                await keep()
            async for part in self._slices.of(stage):
                if self._is_gone():
                    return
                if len(body) >= PART_BYTES:
                    await self._put_part(body, is_last=False)
                    body = b""
                body += part
        if body or is_last:
            await self._put_part(body, is_last)

    async def _put_part(self, body: bytes, is_last: bool) -> None:
        start, self._start = self._start, None
        if start is not None:
            if is_last:
                start["headers"].append((b"content-length", b"%d" % len(body)))
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _news(generation: Generation, answer: StreamedAnswer) -> Iterator[bytes]:
    """Yield the events for the new output of all choices."""
    return (piece for choice in generation.choices if choice.has_unsent for piece in answer.chunk(choice))


def _writer(
    generation: Generation, answer: StreamedAnswer, direct: DirectWriter
) -> Callable[[], bool] | None:
    """Return a function that writes a single choice's events as its tokens come, without a task."""
    choice, *others = generation.choices

    def write() -> bool:
        if choice.finish_reason is not None or generation.error is not None or not direct.is_ready:
            return False
        if events := b"".join(answer.chunk(choice)):
            direct.write(events)
        return True

    return None if others else write
