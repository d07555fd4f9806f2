"""Commands that send requests to a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.common import DEFAULT_URL, ApiKey, Url, failures


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
    from deploy.complete import stream_completion

    body = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    text = sys.stdin.read() if prompt == "-" else prompt
    with failures():
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

    with failures():
        run_batch(url, api_key, source, target, concurrency=concurrency, priority=priority)
