"""`tandem drain` and `tandem role`: have a worker emptied, and tell what became of its requests."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from deploy.complete import checked, client


def operate(url: str, api_key: str | None, path: str, body: dict[str, Any]) -> None:
    """Returns when the worker is empty. Raises `ServerError`."""
    with client(url, api_key) as http:
        report = checked(http.post(quote(path), json=body)).json()
    counts = ", ".join(
        f"{report[name]} {name.replace('_', ' ')}" for name in ("moved", "redirected", "placed_anew")
    )
    print(f"{report['id']} is empty after {report['seconds']:.2f} s; requests: {counts}")
