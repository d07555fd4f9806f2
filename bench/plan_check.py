"""How well `tandem plan` predicts: the same loads on a real server and in the simulation.

    python -m bench.plan_check [--rates 2,4,6] [--seconds 20] [--repeats 3] [--output FOLDER] [serve options]

A server with the given options is measured as `tandem profile` does. Then each load runs on a fresh one
`--repeats` times, loads in turn, and once in the simulation. The ratios are simulated over measured, of the
median run: 1 is exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kills import serving
from bench.record import made_by, write_results
from bench.serve.client import Target
from bench.serve.load import Load
from bench.serve.runner import run_load
from bench.serve.statistics import Summary
from bench.serve.workload import LoadRequest
from planner.calibration import ALWAYS_SPLIT, calibrate
from planner.cluster import Layout, SimulatedCluster
from planner.profile import Profile
from planner.request import SimulatedRequest
from router.placement import placement_policy

FIGURES = ("ttft p50", "ttft p90", "tpot p50", "tpot p90")
BLOCK_TOKENS = 16
"""The prompts share nothing: the size of a block only rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default="2,4,6", help="requests a second of each load")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--output", type=Path)
    options, serve_options = parser.parse_known_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    with serving([*serve_options, *ALWAYS_SPLIT]) as http:
        profile = calibrate(str(http.base_url), [made_by("python -m bench.plan_check")])
    loads = {rate: requests(rate, options) for rate in rates}
    runs: dict[float, list[list[float]]] = {rate: [] for rate in rates}
    with serving(serve_options) as http:
        layout = deployed(http.get("/cluster").json())
        for repeat in range(options.repeats):
            salt = {"cache_salt": f"run-{repeat}"}  # or else it finds the prompts of the run before
            target = Target(str(http.base_url), profile.name, ignore_eos=True, extra_body=salt)
            for rate, load in loads.items():
                runs[rate].append(figures(run_load(target, load).summary))
    rows = {
        rate: (np.median(runs[rate], axis=0).tolist(), simulate(profile, layout, loads[rate]))
        for rate in rates
    }
    show(rows)
    if options.output is not None:
        write_results(
            options.output,
            "python -m bench.plan_check",
            {"profile": msgspec.to_builtins(profile), "runs": runs, "loads": rows},
        )


def requests(rate: float, options: Any) -> list[LoadRequest]:
    return Load(
        num_prompts=round(rate * options.seconds),
        random_input_len=options.input_len,
        random_output_len=options.output_len,
        random_range_ratio=0.8,
        request_rate=rate,
        seed=round(rate * 1000),
    ).requests()


def deployed(cluster: dict[str, Any]) -> Layout:
    """What runs there, for the simulation."""
    roles = [worker["role"] for worker in cluster["workers"]]
    told = cluster["placement"]
    policy = placement_policy("cost", told["prefill"], told["decode"])
    return Layout(roles.count("prefill"), roles.count("decode"), policy, told["disaggregation"])


def simulate(profile: Profile, layout: Layout, load: Sequence[LoadRequest]) -> list[float]:
    simulated = [
        SimulatedRequest(request.arrival or 0.0, len(request.prompt), request.output_len) for request in load
    ]
    SimulatedCluster(layout, profile, BLOCK_TOKENS).run(simulated)
    ttft = [request.ttft_s for request in simulated]
    tpot = [request.tpot_s for request in simulated if request.output_tokens > 1]
    return [*np.percentile(ttft, (50, 90)).tolist(), *np.percentile(tpot, (50, 90)).tolist()]


def figures(summary: Summary) -> list[float]:
    if summary.failed:
        raise RuntimeError(f"requests failed: {summary.errors}")
    return [summary.ttft.p50, summary.ttft.p90, summary.tpot.p50, summary.tpot.p90]


def show(rows: dict[float, tuple[list[float], list[float]]]) -> None:
    table = Table(title="simulated / measured, milliseconds and ratio", title_justify="left")
    table.add_column("requests/s", justify="right")
    for name in FIGURES:
        table.add_column(name, justify="right")
    for rate, (measured, predicted) in rows.items():
        cells = [
            f"{ours * 1e3:.1f} / {real * 1e3:.1f} = {ours / real:.2f}"
            for ours, real in zip(predicted, measured, strict=True)
        ]
        table.add_row(f"{rate:g}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
