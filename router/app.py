"""The HTTP application: all endpoints with their API documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from router.answers.formats import AnswerWriter, CompletionFormat
from router.answers.parsed_chat import chat_format
from router.anthropic.answer import MessageAnswer
from router.anthropic.body import MessageBody
from router.anthropic.request import own_field
from router.api.adapters import adapter_operations
from router.api.admin import admin_operations
from router.api.doctor import doctor_operations
from router.api.generate import GenerateEndpoint, PlainTurn
from router.api.openapi import Operation, openapi
from router.api.operate import worker_operations
from router.api.pages import page_operations
from router.api.placement import placement_operations
from router.api.responses import response_operations
from router.api.tokenize import converter
from router.browsers import BrowserGuard
from router.middleware import Envelope
from router.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.pooling.body import EmbeddingBody, RerankBody, ScoreBody
from router.pooling.requests import EmbeddingAnswer, RankingAnswer, ScoreAnswer
from router.state import RouterState

STREAM = "JSON, or with `stream` server-sent events"
RANKING = "`results` of `index`, `relevance_score` and `document`, best first, `usage`"


def build_app(state: RouterState) -> Envelope:
    """Return the application with all endpoints, over the given state."""

    def post(path: str, body: type[msgspec.Struct], answer: str, endpoint: Any, *aliases: str) -> Operation:
        return Operation(path, endpoint, body.__doc__ or "", answer, body, aliases=aliases)

    def generate(
        task: str, answer: Callable[..., AnswerWriter], own_field: Callable[[str], str] = str
    ) -> GenerateEndpoint:
        turn = PlainTurn(state, task, answer, own_field)
        return GenerateEndpoint(state, lambda scope: turn)

    completions = generate("completion", lambda prepared, *output: CompletionFormat(*output))
    chat = generate("chat", lambda prepared, *output: chat_format(*output))
    message = generate("message", lambda prepared, *output: MessageAnswer(*output), own_field)
    count_tokens = converter(state, "count_tokens")
    embeddings, scores = generate("embeddings", EmbeddingAnswer), generate("score", ScoreAnswer)
    ranking = generate("ranking", RankingAnswer)
    tokenize, detokenize = converter(state, "tokenize"), converter(state, "detokenize")
    operations = [
        post("/v1/completions", CompletionBody, STREAM, completions),
        post("/v1/chat/completions", ChatBody, STREAM, chat),
        *response_operations(state),
        post("/v1/messages", MessageBody, "Anthropic's message, or with `stream` its events", message),
        post("/v1/messages/count_tokens", MessageBody, "`input_tokens`", count_tokens),
        post("/v1/embeddings", EmbeddingBody, "`data` of `embedding`, `usage`", embeddings),
        post("/score", ScoreBody, "`data` of `score`, `usage`", scores, "/v1/score"),
        post("/v1/rerank", RerankBody, RANKING, ranking, "/v2/rerank", "/rerank"),
        post("/tokenize", TokenizeBody, "`count`, `max_model_len`, `tokens`, `token_strs`", tokenize),
        post("/detokenize", DetokenizeBody, "`prompt`", detokenize),
        *adapter_operations(state),
        *admin_operations(state),
        *placement_operations(state),
        *doctor_operations(state),
        *worker_operations(state),
    ]
    describe = cache(lambda: openapi(operations, state.keys.are_needed))
    operations += page_operations(state.config, state.chats.has_template, describe)
    routes = [
        Route(path, each.endpoint, methods=[each.method])
        for each in operations
        for path in (each.path, *each.aliases)
    ]
    router = Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = (
            router  # makes the router raise for unknown paths and methods instead of answering itself
        )
        await router(scope, receive, send)

    return Envelope(app, state.metrics, state.keys, BrowserGuard(state.config.host))
