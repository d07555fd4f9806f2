"""`tandem drain`, `tandem role` and `tandem restart`, and what became of the requests of those workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from deploy.complete import checked, client


def operate(url: str, api_key: str | None, path: str, body: dict[str, Any]) -> None:
    """Returns when the worker is empty. Raises `ServerError`."""
    with client(url, api_key) as http:
        report = checked(http.post(quote(path), json=body)).json()
    print(f"{report['id']} is empty after {report['seconds']:.2f} s; requests: {_counts(report)}")


def restart(url: str, api_key: str | None) -> None:
    """Returns when all workers are new. Raises `ServerError`."""
    with client(url, api_key) as http:
        report = checked(http.post("/restart", json={})).json()
    workers = ", ".join(report["restarted"]) or "none"
    print(f"restarted after {report['seconds']:.2f} s: {workers}; requests: {_counts(report)}")


def _counts(report: Mapping[str, Any]) -> str:
    names = ("moved", "redirected", "placed_anew")
    return ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in names)
