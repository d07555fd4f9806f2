"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from router.api.admin import admin_routes
from router.api.chat import Chat
from router.api.completions import Completions
from router.api.tokenize import Detokenize, Tokenize
from router.errors import ApiError
from router.exchange import Endpoint, Handler
from router.middleware import Envelope
from router.state import RouterState


def build_app(state: RouterState) -> FastAPI:
    """All endpoints over the given state. The generating ones are plain ASGI, for their streams' sake."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(admin_routes(state))
    handlers: dict[str, Handler] = {
        "/v1/completions": Completions(state),
        "/v1/chat/completions": Chat(state),
        "/tokenize": Tokenize(state),
        "/detokenize": Detokenize(state),
    }
    for path, handler in handlers.items():
        app.router.routes.append(Route(path, Endpoint(handler), methods=["POST"]))
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(Envelope, metrics=state.metrics, api_key=state.config.api_key)
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    answer = ApiError(error.status_code, message)
    return Response(
        answer.body(), error.status_code, headers=dict(error.headers or {}), media_type="application/json"
    )
