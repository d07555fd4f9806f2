"""`tandem complete`: one prompt from the terminal, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

_CONNECT_TIMEOUT_S = 5.0


class ServerError(Exception):
    """The server could not be reached, or answered with an error; the text says which."""


def client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url, headers=headers, timeout=timeout)


def checked(response: httpx.Response) -> httpx.Response:
    """Raise `ServerError` with the server's own words when the status says that something failed."""
    if response.is_success:
        return response
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    raise ServerError(f"{response.url}: {response.status_code}: {message}")


def stream_completion(
    url: str, api_key: str | None, model: str | None, prompt: str, parameters: Mapping[str, Any]
) -> int:
    """Print the completion as it comes; returns the exit code."""
    try:
        with client(url, api_key) as http:
            name = model or checked(http.get("/v1/models")).json()["data"][0]["id"]
            given = {key: value for key, value in parameters.items() if value is not None}
            body = {"model": name, "prompt": prompt, "stream": True, **given}
            for text in _texts(http, body):
                print(text, end="", flush=True)
        print()
    except httpx.HTTPError as error:
        print(f"tandem: {url}: {error}", file=sys.stderr)
        return 1
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    return 0


def _texts(http: httpx.Client, body: Mapping[str, Any]) -> Iterator[str]:
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
