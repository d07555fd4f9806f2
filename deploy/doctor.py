"""`tandem doctor`: shows a server's bottlenecks, the most costly first, and what to change."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from deploy.complete import checked, client


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
