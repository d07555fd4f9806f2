"""Commands that talk to a running server: an operator's, and those that send requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from deploy.commands import DEFAULT_URL, ApiKey, Url
from protocol.errors import ConfigError

Worker = Annotated[str, typer.Argument(help="A worker's id, as `tandem status` shows it.")]


def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Show workers, roles, load and KV usage, live."""
    from deploy.status import show_status

    show_status(url, api_key, once=once, as_json=as_json, interval_s=interval)


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Show load, KV, links, drafts and their rates, live."""
    from deploy.status import show_top

    show_top(url, api_key, once=once, interval_s=interval)


def drain(worker: Worker, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Move a worker's requests to others, with their KV, and then end the worker."""
    _empty(url, api_key, f"/workers/{worker}/drain", {})


def role(
    worker: Worker,
    new_role: Annotated[Literal["prefill", "decode"], typer.Argument(help="The worker's new role.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Move a worker's requests to others, and switch the worker to another role without a restart."""
    _empty(url, api_key, f"/workers/{worker}/role", {"role": new_role})


def _empty(url: str, api_key: str | None, path: str, body: dict[str, str]) -> None:
    report, counts = _operate(url, api_key, path, body)
    print(f"{report['id']} is empty after {report['seconds']:.2f} s; requests: {counts}")


def _operate(
    url: str, api_key: str | None, path: str, body: Mapping[str, object]
) -> tuple[dict[str, Any], str]:
    """Return the operation's report once it is over, and the numbers of requests that it moved, in words."""
    from deploy.client import client, fields_of

    names = ("moved", "redirected", "placed_again")
    with client(url, api_key, waits=True) as http:
        report = fields_of(http.post(quote(path), json=body), "seconds", *names)
    return report, ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in names)


def restart(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Restart all workers, one after the other. Their requests move to other workers, with their KV."""
    report, counts = _operate(url, api_key, "/restart", {})
    workers = ", ".join(report["restarted"]) or "none"
    print(f"restarted after {report['seconds']:.2f} s: {workers}; requests: {counts}")


def scale(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    draft: Annotated[int | None, typer.Option(help="Draft workers.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Set the number of workers of each role. Requests of removed workers move to others, with their KV."""
    targets = {"prefill": prefill, "decode": decode, "draft": draft}
    body = {name: number for name, number in targets.items() if number is not None}
    if not body:
        raise ConfigError(f"name a role at least: {', '.join(f'--{name} N' for name in targets)}")
    report, counts = _operate(url, api_key, "/scale", body)
    changes = [f"{what}: {', '.join(report[what])}" for what in ("started", "drained") if report[what]]
    what = "; ".join(changes) or "nothing to change"
    print(f"{what} after {report['seconds']:.2f} s; requests: {counts}")


def doctor(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to watch.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON.")] = False,
) -> None:
    """Find what keeps requests waiting now, and say what to change, with figures."""
    from deploy.client import answer_timeout, client, fields_of

    with client(url, api_key) as http:
        limits = answer_timeout(seconds)
        report = fields_of(http.get("/doctor", params={"seconds": seconds}, timeout=limits), "findings")
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for finding in report["findings"]:
        if finding["name"] == "nothing":
            typer.secho("nothing is wrong", bold=True)
            print(f"  {finding['summary']}")
            continue
        where = f" at {finding['worker']}" if finding["worker"] else ""
        typer.secho(f"{finding['name']}{where}: costs {finding['cost']:.1f} requests their time", bold=True)
        print(f"  {finding['summary']}\n  change: {finding['change']}")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in finding["figures"].items()))


def complete(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
) -> None:
    """Complete a prompt and print the text as it comes."""
    from deploy.client import answer_timeout, client, completion_texts, fields_of

    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
    body |= {"prompt": _standard_input() if prompt == "-" else prompt}
    body |= {name: value for name, value in {"seed": seed, "stop": stop or None}.items() if value is not None}
    with client(url, api_key, waits=True) as http:
        if model is None:
            models = fields_of(http.get("/v1/models", timeout=answer_timeout()), "data")["data"]
            model = next((each["id"] for each in models), "")
        body["model"] = model
        for text in completion_texts(http, body):
            print(text, end="", flush=True)
    print()


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"PROMPT: standard input must be UTF-8: {error.reason} at byte {error.start}"
        ) from error


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="JSONL with custom_id, url and body in each line.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="JSONL with custom_id, response and error in each line.")
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 64,
    priority: Annotated[
        int,
        typer.Option(
            min=-(2**31), max=2**31 - 1, help="Priority of requests without one; lower comes first."
        ),
    ] = 1000,
) -> None:
    """Run a file of requests in the Batch API's format. Run it again to continue an interrupted batch.

    At the end it prints how many completed and failed; the exit status is 1 unless all completed.
    """
    from deploy.batch import run_batch

    run_batch(url, api_key, source, target, concurrency=concurrency, priority=priority)
