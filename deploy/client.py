"""Talks to a running server: completes a prompt, changes its workers, shows its bottlenecks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.text import Text

from protocol.errors import ConfigError, TandemError

_CONNECT_TIMEOUT_S = 5.0


class ServerError(TandemError):
    """The server could not be reached, or answered with an error; the message says which."""


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with the first API key of `api_key`: TANDEM_API_KEY may hold several."""
    key = (api_key or "").partition(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def client(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    """Yield an HTTP client of the server. Raises `ServerError` for HTTP errors within the block."""
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, headers=authorization(api_key), timeout=timeout) as http:
            yield http
    except httpx.HTTPError as error:
        hint = (
            ": name its authority's PEM file in SSL_CERT_FILE" if "CERTIFICATE_VERIFY" in str(error) else ""
        )
        raise ServerError(f"{url}: {error}{hint}") from error


def checked(response: httpx.Response) -> httpx.Response:
    """Raise `ServerError` with the server's own message if the status is an error."""
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
) -> None:
    """Print the completion as it comes. Raises `ServerError`."""
    with client(url, api_key) as http:
        name = model or checked(http.get("/v1/models")).json()["data"][0]["id"]
        chosen = {key: value for key, value in parameters.items() if value is not None}
        for text in _texts(http, {"model": name, "prompt": prompt, "stream": True, **chosen}):
            print(text, end="", flush=True)
    print()


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


def operate(url: str, api_key: str | None, path: str, body: dict[str, Any]) -> None:
    """Drain a worker or change its role. Returns when the worker is empty. Raises `ServerError`."""
    with client(url, api_key) as http:
        report = checked(http.post(quote(path), json=body)).json()
    print(f"{report['id']} is empty after {report['seconds']:.2f} s; requests: {_counts(report)}")


def restart(url: str, api_key: str | None) -> None:
    """Restart all workers. Returns when all have restarted. Raises `ServerError`."""
    with client(url, api_key) as http:
        report = checked(http.post("/restart", json={})).json()
    workers = ", ".join(report["restarted"]) or "none"
    print(f"restarted after {report['seconds']:.2f} s: {workers}; requests: {_counts(report)}")


def scale(url: str, api_key: str | None, targets: Mapping[str, str | None]) -> None:
    """Change the number of workers and wait. Raises `ServerError`, or `ConfigError` for a bad target."""
    body = {role: _number(role, text) for role, text in targets.items() if text is not None}
    if not body:
        raise ConfigError(f"name a role at least: {', '.join(f'--{role} N' for role in targets)}")
    with client(url, api_key) as http:
        report = checked(http.post("/scale", json=body)).json()
    changes = [f"{what}: {', '.join(report[what])}" for what in ("started", "drained") if report[what]]
    what = "; ".join(changes) or "nothing to change"
    print(f"{what} after {report['seconds']:.2f} s; requests: {_counts(report)}")


def _number(role: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{role}: must be a whole number of workers, got {text!r}") from None


def _counts(report: Mapping[str, Any]) -> str:
    names = ("moved", "redirected", "placed_again")
    return ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in names)


def show_findings(url: str, api_key: str | None, *, seconds: float, as_json: bool) -> None:
    """Make the server watch itself, and print its findings. Raises `ServerError`."""
    with client(url, api_key) as http:
        report: dict[str, Any] = checked(http.get("/doctor", params={"seconds": seconds})).json()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False)
    for finding in report["findings"]:
        console.print(Text(_title(finding), style="bold"))
        console.print(Text(f"  {finding['summary']}"))
        if finding["name"] != "nothing":
            console.print(Text(f"  change: {finding['change']}"))
            console.print(Text("  " + ", ".join(f"{k} {v:.4g}" for k, v in finding["figures"].items())))


def _title(finding: dict[str, Any]) -> str:
    if finding["name"] == "nothing":
        return "nothing is wrong"
    where = f" at {finding['worker']}" if finding["worker"] else ""
    return f"{finding['name']}{where}: costs {finding['cost']:.1f} requests their time"
