"""Talks to a running server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx

from protocol.errors import ConfigError, TandemError
from protocol.server_options import is_sendable

_CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
_SILENCE_S = 60
"""Seconds after which a server's host that acknowledges nothing is taken for gone."""
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
)


class ServerError(TandemError):
    """The server could not be reached, or answered with an error; the message says which."""


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with the first API key of `api_key`: TANDEM_API_KEY may hold several. Raises
    `ConfigError` for a key that no header can hold.
    """
    key = (api_key or "").partition(",")[0].strip()
    if not is_sendable(key):
        raise ConfigError("--api-key: must have printable ASCII characters only")
    return {"Authorization": f"Bearer {key}"} if key else {}


Transport = TypeVar("Transport", httpx.HTTPTransport, httpx.AsyncHTTPTransport)


def mounts(transport: type[Transport], limits: httpx.Limits = httpx.Limits()) -> dict[str, Transport]:
    """Return the mounts of a client that may wait for long, but not for a host that is gone.

    A proxy of the environment would be bypassed by them; it has such limits of its own.
    """
    return {} if getproxies() else {"all://": transport(limits=limits, socket_options=_KEEP_ALIVE)}


def answer_timeout(further_s: float = 0.0) -> httpx.Timeout:
    """Return the limits of a request whose answer takes the server no longer than usual and `further_s`."""
    return httpx.Timeout(ANSWER_TIMEOUT_S + further_s, connect=_CONNECT_TIMEOUT_S)


@contextmanager
def client(url: str, api_key: str | None, *, waits: bool = False) -> Iterator[httpx.Client]:
    """Yield an HTTP client of the server. Raises `ServerError` for HTTP errors within the block.

    `waits`: an answer may take as long as the server's requests do.
    """
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S) if waits else answer_timeout()
    headers, mounted = authorization(api_key), mounts(httpx.HTTPTransport)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, mounts=mounted) as http:
            yield http
    except httpx.ReadTimeout as error:
        raise ServerError(f"{url}: it is connected, but does not answer") from error
    except httpx.HTTPError as error:
        is_trust = "CERTIFICATE_VERIFY" in str(error)
        hint = ": name its authority's PEM file in SSL_CERT_FILE" if is_trust else ""
        raise ServerError(f"{url}: {error}{hint}") from error


def checked(response: httpx.Response) -> httpx.Response:
    """Raise `ServerError` with the server's own message if the status is an error."""
    if response.is_success:
        return response
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(response.text.split())[:200]
    raise ServerError(f"{response.url}: {response.status_code}: {message}")


def fields_of(response: httpx.Response, *names: str) -> dict[str, Any]:
    """Return the JSON object of an answer. Raises `ServerError` if it is an error, or lacks one of `names`.

    Answers of other kinds of servers lack them.
    """
    try:
        fields = checked(response).json()
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not fields.keys() >= set(names):
        raise ServerError(f"{response.url}: not an answer of Tandem: a JSON object with {', '.join(names)}")
    return fields


def completion_texts(http: httpx.Client, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the completion's text as it comes. Raises `ServerError`."""
    with http.stream("POST", "/v1/completions", json=body) as response:
        checked(response)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["text"]
