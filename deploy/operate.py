"""Changes a server's workers on an operator's request, and prints what happened to their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from deploy.complete import checked, client
from protocol.errors import ConfigError


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
    """Change the number of workers. Returns when it is reached. Raises `ServerError`, or `ConfigError` if a
    target is not a number.
    """
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
