"""Endpoints that need no key: health, version and metrics, and the pages `/`, `/docs` and `/openapi.json`.

The pages load nothing from other sites.
"""

from __future__ import annotations

import asyncio
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter, Request
from markupsafe import Markup, escape
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from protocol.version import version
from router.api.access import Json, State

_FOLDER = Path(__file__).parent / "pages"
_PARTS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_ALONE = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_DOCS_POLICY = f"{_ALONE}; style-src 'unsafe-inline'"
_INDEX_POLICY = f"{_ALONE}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"


router = APIRouter()


@router.get("/health", response_description="`status`")
async def show_health() -> Response:
    """Tell that the router lives."""
    return Json({"status": "ok"})


@router.get("/ready", response_description="`status`")
async def show_readiness(state: State) -> Response:
    """Tell that requests are served, and which workers are `awaited`; else 503 with a `reason`."""
    reason = state.not_ready()
    if reason is not None:
        return Json({"status": "not ready", "reason": reason}, status_code=503)
    awaited = state.registry.awaited()
    return Json({"status": "ready", **({"awaited": awaited} if awaited else {})})


@router.get("/version", response_description="`version`")
async def show_version() -> Response:
    """Show Tandem's version."""
    return Json({"version": version()})


@router.get("/metrics", response_description="Prometheus text format")
async def show_metrics(state: State) -> Response:
    """Show the metrics of the router and of all workers."""
    return Response(await asyncio.to_thread(state.metrics.render), media_type=CONTENT_TYPE_LATEST)


@router.get("/", response_description="HTML, or JSON")
async def show_index(request: Request, state: State) -> Response:
    """Show a playground and a live view of the cluster; or links."""
    about = {"name": "tandem", "version": version(), "model": state.config.model_name}
    if "text/html" in request.headers.get("accept", ""):
        offered = {"has_chat": state.chats.has_template, "splits": state.config.disaggregation}
        return _page("index.html", _INDEX_POLICY, {**about, **offered})
    links = {"docs": "/docs", "openapi": "/openapi.json", "api": "/v1", "workers": "/workers"}
    return JSONResponse({**about, **links, "metrics": "/metrics"}, headers={"vary": "accept"})


@router.get("/page/{name}", response_description="JavaScript, CSS or SVG")
async def show_part(name: str) -> Response:
    """Return a script, style or icon of the page at `/`."""
    if name not in _parts():
        raise HTTPException(404)
    headers = {**_SAFE, "cache-control": "no-cache"}
    return Response(_parts()[name], media_type=_PARTS[Path(name).suffix], headers=headers)


@router.get("/docs", response_description="HTML")
async def show_docs(request: Request) -> Response:
    """Describe this API, for people."""
    return _page("docs.html", _DOCS_POLICY, await _document(request))


@router.get("/openapi.json", response_description="OpenAPI 3.1")
async def show_document(request: Request) -> Response:
    """Describe this API, for programs."""
    return JSONResponse(await _document(request))


async def _document(request: Request) -> dict[str, Any]:
    """Return the OpenAPI document, which is generated at the first call."""
    found: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    return found


def _page(template: str, policy: str, variables: dict[str, Any]) -> Response:
    text = _templates().get_template(template).render(variables)
    return HTMLResponse(text, headers={**_SAFE, "content-security-policy": policy, "vary": "accept"})


@cache
def _parts() -> dict[str, bytes]:
    """Return the page's files by name; no other file of the folder is served."""
    return {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _PARTS}


@cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(_FOLDER)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(code=_code, kind=_kind, limits=_limits)
    return environment


def _code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _kind(schema: dict[str, Any]) -> Markup:
    """Return a field's type in words, with links to described types."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return Markup(" or ").join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return Markup("array of {}").format(_kind(schema["items"]))
    return escape(schema.get("type", "any"))


def _limits(schema: dict[str, Any]) -> str:
    found = {}
    for part in (schema, *schema.get("anyOf", ())):
        found.update({name: part[name] for name in part if name.startswith(("min", "max", "exclusive"))})
    return ", ".join(f"{name} {value}" for name, value in found.items())
