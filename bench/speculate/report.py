"""Formats the figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report import made_by, markdown_table
from bench.speculate.figures import CaseFigures, SpeculationVerdict

_VERDICTS = (
    *("workload", "T", "method", "best K (speedup) at each concurrency", "no gain from", "auto's worst"),
    *("auto / best fixed, worst", "tax of K = 0, worst"),
)
_COLUMNS = (
    *("concurrency", "method", "K", "tok/s", "speedup", "predicted", "step, ms", "TPOT, ms", "speedup"),
    *(
        "TTFT, ms",
        "tokens/forward",
        "tau",
        "accepted",
        "by position, %",
        "draft share",
        "cost",
        "same tokens",
    ),
)


SHOWN_POSITIONS = 8


def as_markdown(
    settings: dict[str, Any],
    figures: Sequence[CaseFigures],
    verdicts: Sequence[SpeculationVerdict],
) -> str:
    """Return all tables, and how they were made."""
    lines = [
        "# Speculation",
        "",
        made_by(),
        f"{settings['model']}, {settings['target']}. Medians over {settings['rounds']} rounds; speedups in",
        'output tokens per second (prefill included) over "off" in the same round, which does not speculate.',
        "Predicted: S = tau / (v + K c), from the times of decode steps and the tokens per forward. Tokens",
        "per forward count a request's forwards with and without drafts, tau only those with. The cost is",
        f"that of a million output tokens at {settings['price']:g} per worker-hour.",
        "",
        "## What pays",
        "",
        markdown_table(_VERDICTS, map(_verdict_row, verdicts), texts=4),
    ]
    for workload, temperature in dict.fromkeys(_load(figure) for figure in figures):
        rows = [_row(figure) for figure in figures if _load(figure) == (workload, temperature)]
        lines += ["", f"## {workload}, temperature {temperature:g}", "", markdown_table(_COLUMNS, rows)]
    return "\n".join(lines) + "\n"


def _load(figure: CaseFigures) -> tuple[str, float]:
    return figure.case.block.workload, figure.case.block.temperature


def _verdict_row(verdict: SpeculationVerdict) -> list[str]:
    block = verdict.block
    best = ", ".join(f"{c}: {k} ({speedup:.2f})" for c, (k, speedup) in verdict.best.items())
    crossover = "-" if verdict.crossover is None else f"{verdict.crossover:.0f}"
    cells = [block.workload, f"{block.temperature:g}", block.drafting, best or "-", crossover]
    return [*cells, _number(verdict.auto_worst), _number(verdict.auto_of_best), _percent(verdict.tax)]


def _row(figure: CaseFigures) -> list[str]:
    case = figure.case
    return [
        str(case.block.concurrency),
        case.block.drafting,
        "off" if case.num_tokens is None else str(case.num_tokens),
        f"{figure.throughput:.1f}",
        _number(figure.speedup),
        _number(figure.predicted),
        _number(figure.step_s and figure.step_s * 1e3),
        f"{figure.tpot * 1e3:.2f}",
        _number(figure.decode_speedup),
        f"{figure.ttft * 1e3:.1f}",
        _number(figure.per_forward),
        _number(figure.tau),
        _percent(figure.acceptance),
        " ".join(f"{share:.0%}"[:-1] for share in figure.by_position[:SHOWN_POSITIONS]) or "-",
        _percent(figure.draft_share),
        f"{figure.cost:.3g}",
        "yes" if figure.same else "no",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
