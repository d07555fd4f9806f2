"""Commands that measure or simulate a server."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.common import fail, failures


def bench(context: typer.Context) -> None:
    """Measure a server: `tandem bench serve --help`."""
    try:
        from bench.cli import app as bench_app

        bench_app(args=context.args, prog_name="tandem bench")
    except ModuleNotFoundError as error:
        raise fail(f"bench needs the package {error.name}: pip install 'tandem-serve[bench]'") from error


def plan(
    trace: Annotated[str, typer.Option(metavar="FILE", help="JSONL trace in Mooncake's form.")],
    slo_ttft: Annotated[str, typer.Option(metavar="SECONDS", help="Limit of the time to the first token.")],
    slo_tpot: Annotated[str, typer.Option(metavar="SECONDS", help="Limit of the time between two tokens.")],
    workers: Annotated[
        str, typer.Option(metavar="N", help="Prefill and decode workers together, at least 2.")
    ],
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Profile from `tandem profile`. (default: h100-llama-3.1-8b)"),
    ] = None,
    trace_scale_lengths: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Factor on the trace's lengths. (default: 1)")
    ] = None,
    trace_speedup: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Factor on the rate of requests. (default: 1)")
    ] = None,
    max_input_len: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Longest prompt; longer ones are cut.")
    ] = None,
    max_output_len: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Longest output; longer ones are cut.")
    ] = None,
    num_prompts: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Only the first requests of the trace.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder for plan.json and plan.svg. (default: plan)")
    ] = None,
) -> None:
    """Simulate a trace on a number of workers with every split into roles, and recommend a split."""
    given = dict(locals())
    from rich.console import Console

    from planner.command import parse
    from planner.command import plan as run

    with failures():
        run(parse(given), Console())
