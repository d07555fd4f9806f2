"""The HTTP application: all endpoints with their API documentation."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from protocol.version import version
from router.api import clients, generate, observe, operate, public
from router.api.access import BEARER, add_schemas, admitted, error_answers, guarded, operator
from router.middleware import Envelope, answer_error
from router.state import RouterState


class _Application(FastAPI):
    """A FastAPI app with msgspec's schemas, without FastAPI's own body limits and error format."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(
            AsyncExitStackMiddleware(self.router), handlers=self.exception_handlers
        )
        state: RouterState = self.state.router
        if state.config.origins:
            app = CORSMiddleware(app, state.config.origins, allow_methods=["*"], allow_headers=["*"])
        return Envelope(app, state.metrics, state.config.root_path)

    def openapi(self) -> dict[str, Any]:
        return self.openapi_schema or add_schemas(super().openapi())


def build_app(state: RouterState) -> FastAPI:
    """Return the application with all endpoints, over the given state."""
    errors = (Exception, HTTPException, RequestValidationError)
    app = _Application(
        title="Tandem",
        version=version(),
        description="OpenAI's API with vLLM's extensions, and Anthropic's messages.",
        openapi_url=None,
        servers=[{"url": state.config.root_path}] if state.config.root_path else None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        responses=error_answers(),
        exception_handlers=dict.fromkeys(errors, answer_error),
    )
    app.state.router = state
    key = [Security(BEARER)] if state.keys.are_needed else []
    generate.add_routes(app, state, key)
    app.include_router(clients.router, dependencies=[*key, Depends(admitted)])
    for router in (observe.router, operate.router):
        app.include_router(router, dependencies=[*key, Depends(operator)])
    app.include_router(public.router, dependencies=[Depends(guarded)])
    return app
