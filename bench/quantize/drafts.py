"""`tandem bench quantize-drafts`: what speculation brings with a quantized target, draft, or both."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from bench.quantize.cells import PLAIN, ROUNDED
from bench.record import RESULTS, command_line, made_by, write_results
from models.bundled import BUNDLED_MODEL
from protocol.errors import TandemError

if TYPE_CHECKING:
    from bench.speculate.figures import Figure
    from bench.speculate.plan import Drafting, NumTokens, Plan
    from protocol.config import ServeConfig

FORMATS = ",".join([PLAIN, *ROUNDED])


class Pair(msgspec.Struct, frozen=True):
    """A target and a draft in their formats, with so many requests at once.

    Output tokens per second, prompts included; `speedup` is over the same target without drafts in the same
    rounds, `over_plain` over the one in bf16 without drafts, which ran at another time. `same` says whether
    all tokens were the target's own.
    """

    target: str
    draft: str
    concurrency: int
    throughput: float
    speedup: float
    over_plain: float
    acceptance: float | None
    tau: float | None
    same: bool


def quantize_drafts(
    target: Annotated[str, typer.Option(help=f"comma-separated, of {FORMATS}")] = "bf16,int8,int4",
    draft: Annotated[str, typer.Option(help=f"comma-separated, of {FORMATS}")] = "bf16,int8,int4",
    concurrency: Annotated[str, typer.Option(help="comma-separated: requests at once")] = "1,4,16",
    num_tokens: Annotated[str, typer.Option(help="to draft: a number, or auto")] = "4",
    rounds: Annotated[int, typer.Option(min=1, help="that the medians are of")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="of a case, or as many as its concurrency")] = 8,
    output_len: Annotated[int, typer.Option(min=2, help="tokens to generate")] = 128,
    model: Annotated[str, typer.Option(help="folder of the target")] = str(BUNDLED_MODEL),
    draft_model: Annotated[str | None, typer.Option(help="folder; default: the bundled one")] = None,
    threads: Annotated[int, typer.Option(min=1, help="for the forward")] = os.cpu_count() or 1,
    output: Annotated[Path, typer.Option(help="folder for the table and the JSON")] = RESULTS
    / "quantize-drafts",
) -> None:
    """Draft with a small model on held-out code, with target and draft in each pair of formats, greedily."""
    settings: dict[str, Any] = dict(locals())
    logging.basicConfig(level="ERROR")
    console = Console()
    from bench.speculate.plan import Plan

    try:
        targets = _formats(target, "--target")
        plan = Plan(
            workloads=["completion"],
            temperatures=[0.0],
            concurrencies=_numbers(concurrency),
            num_tokens=[_num_tokens(num_tokens)],
            draftings=[drafting_of(name, draft_model, model) for name in _formats(draft, "--draft")],
            rounds=rounds,
            requests=requests,
            output_len=output_len,
        )
    except (TandemError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if PLAIN not in targets:
        targets.insert(0, PLAIN)  # what the others are compared with
    try:
        figures = {name: _measure(name, plan, model, threads, console) for name in targets}
    except (TandemError, RuntimeError) as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    pairs = pairs_of(figures)
    command = command_line("tandem bench quantize-drafts", quantize_drafts, settings)
    write_results(output, command, {"threads": threads, "pairs": msgspec.to_builtins(pairs)})
    text = as_markdown(command, pairs)
    (output / "README.md").write_text(text)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)


def _formats(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FORMATS.split(","):
            raise ValueError(f"{flag}: {name!r} is not one of {FORMATS}")
    return names


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--concurrency: {text!r} is not numbers with commas") from None
    if not all(1 <= number <= 64 for number in numbers):
        raise ValueError(f"--concurrency: {text} is not within 1 to 64")
    return numbers


def _num_tokens(text: str) -> NumTokens:
    from bench.speculate.plan import parse_num_tokens

    try:
        return parse_num_tokens(text)
    except ValueError:
        raise ValueError(f"--num-tokens: {text!r} is neither a number nor auto") from None


def _rounding(name: str) -> str | None:
    return None if name == PLAIN else name


def drafting_of(format: str, draft_model: str | None, model: str) -> Drafting:
    """A draft model with weights in this format. Raises `ConfigError`."""
    from bench.speculate.plan import Drafting
    from deploy.config import speculative_config

    options = {"method": "draft_model", "model": draft_model, "quantization": _rounding(format)}
    return Drafting(format, speculative_config(options, "--draft-model", model))


def config_of(format: str, model: str, max_num_seqs: int) -> ServeConfig:
    """Of an engine without drafts, with weights in this format. Raises `ConfigError`."""
    from deploy.config import load_config

    flags: dict[str, object] = {
        "model": model,
        "dtype": "bfloat16",
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": 256 << 20,
        "log_level": "error",
    }
    if format != PLAIN:
        flags["quantization"] = format
    return load_config(flags, environ={})


def _measure(target: str, plan: Plan, model: str, threads: int, console: Console) -> list[Figure]:
    """Raises RuntimeError when a request fails, `ConfigError` for a model that does not take the format."""
    import torch

    from bench.speculate.command import measure
    from bench.speculate.engines import Engines
    from bench.speculate.figures import figures_of

    torch.set_num_threads(threads)
    config = config_of(target, model, max(plan.concurrencies))
    engines = Engines(config, plan.draftings, plan.output_len)
    console.print(f"target {target}", highlight=False)
    try:
        return figures_of(measure(plan, engines, model, console), price=1.0)
    finally:
        engines.close()


def pairs_of(figures: Mapping[str, Sequence[Figure]]) -> list[Pair]:
    """In the order of the targets, of which one is plain."""
    plain = {
        figure.case.block.concurrency: figure.throughput
        for figure in figures[PLAIN]
        if figure.case.num_tokens is None
    }
    pairs = []
    for target, found in figures.items():
        for figure in found:
            block = figure.case.block
            if figure.case.num_tokens is None:
                continue
            pairs.append(
                Pair(
                    target=target,
                    draft=block.drafting,
                    concurrency=block.concurrency,
                    throughput=figure.throughput,
                    speedup=figure.speedup,
                    over_plain=figure.throughput / plain[block.concurrency],
                    acceptance=figure.acceptance,
                    tau=figure.tau,
                    same=figure.same,
                )
            )
    return pairs


def as_markdown(command: str, pairs: Sequence[Pair]) -> str:
    lines = [
        "# Speculation with quantized weights",
        "",
        made_by(command),
        "Tokens per second hold the prompts; the speedup is over the same target without drafts in the same",
        "rounds, the next column over the target in bf16 without drafts, which ran at another time.",
        "",
        "| requests | target | draft | tok/s | speedup | over bf16 | accepted | tau | same tokens |",
        "|--:|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for pair in sorted(pairs, key=lambda pair: pair.concurrency):
        accepted = "-" if pair.acceptance is None else f"{pair.acceptance:.1%}"
        tau = "-" if pair.tau is None else f"{pair.tau:.2f}"
        lines.append(
            f"| {pair.concurrency} | {pair.target} | {pair.draft} | {pair.throughput:.1f} "
            f"| {pair.speedup:.2f} | {pair.over_plain:.2f} | {accepted} | {tau} "
            f"| {'yes' if pair.same else 'no'} |"
        )
    return "\n".join(lines) + "\n"
