"""Commands that talk to a running server: an operator's, and those that send requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.commands import DEFAULT_URL, ApiKey, Url

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
    from deploy.client import operate

    operate(url, api_key, f"/workers/{worker}/drain", {})


def role(
    worker: Worker,
    new_role: Annotated[Literal["prefill", "decode"], typer.Argument(help="The worker's new role.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Move a worker's requests to others, and switch the worker to another role without a restart."""
    from deploy.client import operate

    operate(url, api_key, f"/workers/{worker}/role", {"role": new_role})


def restart(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Restart all workers, one after the other. Their requests move to other workers, with their KV."""
    from deploy.client import restart as run

    run(url, api_key)


def scale(
    prefill: Annotated[str | None, typer.Option(metavar="N", help="Prefill workers.")] = None,
    decode: Annotated[str | None, typer.Option(metavar="N", help="Decode workers.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="N", help="Draft workers.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Set the number of workers of each role. Requests of removed workers move to others, with their KV."""
    from deploy.client import scale as run

    run(url, api_key, {"prefill": prefill, "decode": decode, "draft": draft})


def doctor(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to watch.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON.")] = False,
) -> None:
    """Find what keeps requests waiting now, and say what to change, with figures."""
    from deploy.client import show_findings

    show_findings(url, api_key, seconds=seconds, as_json=as_json)


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
    from deploy.client import stream_completion

    body = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    text = sys.stdin.read() if prompt == "-" else prompt
    stream_completion(url, api_key, model, text, body)


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
