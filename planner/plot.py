"""Plots goodput and latencies over the splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.scenarios import PlanOutcome, Slo


def plot(outcomes: Sequence[PlanOutcome], slo: Slo, path: Path) -> None:
    """Write an SVG file: a line for each mode over the number of prefill workers; colocated as a level."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (goodput, ttft, tpot) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for mode in ("disaggregated", "conditional"):
        line = sorted(
            (each for each in outcomes if each.scenario.mode == mode), key=lambda each: each.scenario.prefill
        )
        prefill = [each.scenario.prefill for each in line]
        goodput.plot(prefill, [each.goodput for each in line], "-o", label=mode)
        ttft.plot(prefill, [each.ttft.p90 for each in line], "-o", label=mode)
        tpot.plot(prefill, [each.tpot.p90 * 1e3 for each in line], "-o", label=mode)
    for each in outcomes:
        if each.scenario.mode == "colocated":
            levels = (goodput, each.goodput), (ttft, each.ttft.p90), (tpot, each.tpot.p90 * 1e3)
            for axes, level in levels:
                axes.axhline(level, color="grey", linestyle="--", label="colocated")
    _finish(goodput, "requests/s within the SLO")
    _finish(ttft, "time to first token, p90, s", slo.ttft_s)
    _finish(tpot, "time per output token, p90, ms", slo.tpot_s * 1e3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _finish(axes: Any, title: str, limit: float | None = None) -> None:
    if limit is not None:
        axes.axhline(limit, color="tab:red", linestyle=":", label="SLO")
    axes.set(xlabel="prefill workers", title=title, ylim=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
