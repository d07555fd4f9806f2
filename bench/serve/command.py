"""`tandem bench serve`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from bench.report import show
from bench.serve.client import Record, ServerTarget
from bench.serve.load import LoadOptions
from bench.serve.report import print_result, write_json
from bench.serve.runner import run_load
from bench.serve.statistics import parse_objectives

_MOST = 2**24
"""The most requests, and the most tokens in one, which are made before the first is sent."""


def _option(text: str, **limits: Any) -> Any:
    return typer.Option(help=text, **limits)


def serve(
    model: Annotated[str, _option("model name to ask for")],
    base_url: Annotated[str, _option("server to drive")] = "http://127.0.0.1:8000",
    num_prompts: Annotated[
        int | None, _option("requests to send; 100, or all of a file", min=1, max=_MOST)
    ] = None,
    random_input_len: Annotated[int, _option("tokens per synthetic prompt", min=1, max=_MOST)] = 256,
    random_output_len: Annotated[int, _option("tokens to ask for", min=1, max=_MOST)] = 128,
    random_prefix_len: Annotated[
        int, _option("further tokens, the same in all prompts", min=0, max=_MOST)
    ] = 0,
    random_range_ratio: Annotated[float, _option("spread of the lengths, 0 to below 1")] = 0.0,
    vocab_size: Annotated[int, _option("synthetic token ids stay below this", max=2**31)] = 4096,
    prompt_file: Annotated[Path | None, _option("JSONL: prompt, max_tokens", exists=True)] = None,
    trace: Annotated[Path | None, _option("JSONL trace in Mooncake's form", exists=True)] = None,
    trace_scale_lengths: Annotated[float, _option("factor on the trace's lengths")] = 1.0,
    trace_speedup: Annotated[float, _option("replay the trace this much faster")] = 1.0,
    max_input_len: Annotated[int | None, _option("cut the trace's prompts to this", min=1)] = None,
    max_output_len: Annotated[int | None, _option("cut the trace's outputs to this", min=1)] = None,
    request_rate: Annotated[float | None, _option("requests/s; a trace's own times, or all at once")] = None,
    burstiness: Annotated[float, _option("1: Poisson arrivals; below 1: burstier")] = 1.0,
    max_concurrency: Annotated[int | None, _option("most requests at once", min=1)] = None,
    num_warmups: Annotated[int, _option("requests sent before measuring", min=0, max=_MOST)] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="generate the full length")] = False,
    temperature: Annotated[float, _option("0 is greedy", min=0.0)] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="use /v1/chat/completions (text prompts)")] = False,
    extra_body: Annotated[str, _option("JSON object added to each request")] = "{}",
    api_key: Annotated[str | None, _option("bearer token", envvar="OPENAI_API_KEY")] = None,
    timeout: Annotated[float, _option("seconds allowed for one request", min=0.1)] = 600.0,
    goodput: Annotated[list[str] | None, _option("objectives in seconds: ttft:0.2,tpot:0.05")] = None,
    seed: Annotated[int, _option("seed of prompts and arrivals", min=0, max=2**31)] = 0,
    output_json: Annotated[Path | None, _option("write the figures here")] = None,
    progress: Annotated[bool, _option("show a progress bar")] = True,
) -> None:
    """Send a load and print latencies, throughput and errors.

    The load is synthetic (random token ids) unless --prompt-file or --trace is given.
    """
    settings: dict[str, Any] = dict(locals())
    console = Console()
    load = LoadOptions(**{name: settings[name] for name in LoadOptions.__dataclass_fields__})
    try:
        requests = load.requests()
        objectives = parse_objectives(goodput or [])
        target = ServerTarget(
            base_url, model, chat, ignore_eos, temperature, api_key, timeout, _json_object(extra_body)
        )
        target.endpoint(), target.body(requests[0])  # fails early if no request can be made from the options
        warmups = load.warmups(num_warmups, requests[0])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        # The bar is drawn rarely, because it shares the cores with the server.
        hidden = not progress or not console.is_terminal
        with Progress(console=console, refresh_per_second=2, disable=hidden) as bar:
            task = bar.add_task("requests", total=len(requests))

            def advance(record: Record) -> None:
                bar.advance(task)

            result = run_load(target, requests, max_concurrency, objectives, warmups, advance)
    except RuntimeError as error:
        show(error)
        raise typer.Exit(1) from error
    print_result(console, result)
    if output_json is not None:
        write_json(output_json, result, {k: v for k, v in settings.items() if k != "api_key"})
    if result.summary.failed == len(requests):
        raise typer.Exit(1)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body must be a JSON object, got {text}")
    return value
