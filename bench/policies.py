"""Goodput of placement policies over the load, simulated.

    python -m bench.policies --trace TRACE [--prefill 8] [--decode 8] [--speedups 2,4,6,8,10]
        [--slo-ttft 5] [--slo-tpot 0.05] [--profile h100-llama-3.1-8b]

All run on the same workers; `cost` decides for each request whether it is split, the others split all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner.profile import DEFAULT_PROFILE, read_profile
from planner.scenarios import PlanOutcome, Scenario, Slo, Study
from planner.trace import TraceFit, fitted, read_trace
from router.placement import RULES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--speedups", default="2,4,6,8,10")
    parser.add_argument("--slo-ttft", type=float, default=5.0)
    parser.add_argument("--slo-tpot", type=float, default=0.05)
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    options = parser.parse_args()
    lines, profile = read_trace(options.trace), read_profile(options.profile)
    slo = Slo(options.slo_ttft, options.slo_tpot)
    chosen = [
        Scenario("conditional" if name == "cost" else "disaggregated", options.prefill, options.decode, name)
        for name in RULES
    ]
    table = Table(title="requests/s within the SLO, and their share", title_justify="left")
    table.add_column("offered", justify="right")
    for name in RULES:
        table.add_column(name, justify="right")
    for speedup in map(float, options.speedups.split(",")):
        fit = TraceFit(speedup=speedup)
        study = Study(profile, fitted(lines, fit), fit.block_tokens, slo)
        found = {outcome.scenario: outcome for outcome in study.outcomes(chosen)}
        offered = len(study.requests) / study.requests[-1].arrival
        table.add_row(f"{offered:.1f}", *(_cell(found[scenario]) for scenario in chosen))
    Console(width=110).print(table)


def _cell(outcome: PlanOutcome) -> str:
    return f"{outcome.goodput:.2f} ({outcome.attainment:.0%})"


if __name__ == "__main__":
    main()
