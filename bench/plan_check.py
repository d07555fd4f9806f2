"""How well `tandem plan` predicts: the same loads on a real server and in the simulation.

    python -m bench.plan_check [--rates 2,4,6] [--seconds 15] [--repeats 3] [--output FOLDER] [serve options]

A server with the given options runs that splits every request, with cores of its own for each worker. In
each of `--repeats` rounds it is measured as `tandem profile` does, since machines are not equally fast all
the time, and gets each load once; the same load is simulated with that profile. The ratios are simulated over
measured, the median of the rounds: 1 is exact. What ran while other programs took more than a twentieth of
the machine's CPU time does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.own_server import serving
from bench.record import made_by, write_results
from bench.serve.client import Target
from bench.serve.load import Load
from bench.serve.runner import run_load
from bench.serve.statistics import Summary
from bench.serve.workload import LoadRequest
from planner.calibration import ALWAYS_SPLIT, calibrate
from planner.cluster import ClusterLayout, SimulatedCluster
from planner.profile import Profile
from planner.request import SimulatedRequest
from router.placement import placement_policy

FIGURES = ("ttft p50", "ttft p90", "tpot p50", "tpot p90")
MOST_OTHERS = 0.05
BLOCK_TOKENS = 16
"""The prompts share nothing: the size of a block only rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default="2,4,6", help="requests a second of each load")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--output", type=Path)
    options, serve_options = parser.parse_known_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    serve_options += ["--worker-threads", str(options.threads), *ALWAYS_SPLIT]
    rounds: dict[float, list[Round]] = {rate: [] for rate in rates}
    profiles = []
    with serving(serve_options) as http:
        url, layout = str(http.base_url), deployed(http.get("/cluster").json())
        for number in range(options.repeats):
            bystanders = Bystanders()
            profile = calibrate(url, [made_by("python -m bench.plan_check")])
            profiles.append(profile)
            profiling = bystanders.share()
            salt = {"cache_salt": f"round-{number}"}  # or else it finds the prompts of the one before
            target = Target(url, profile.name, ignore_eos=True, extra_body=salt)
            for rate in rates:
                load = requests(rate, number, options)
                bystanders = Bystanders()
                real = figures(run_load(target, load).summary)
                others = max(profiling, bystanders.share())
                found = Round(real, simulate(profile, layout, load), others)
                rounds[rate].append(found)
                ratios = " ".join(f"{ratio:.2f}" for ratio in found.ratios)
                print(f"round {number}, {rate:g}/s: {ratios}; others took {others:.0%}", flush=True)
    show(rounds)
    if options.output is not None:
        write_results(
            options.output,
            "python -m bench.plan_check",
            {"profiles": msgspec.to_builtins(profiles), "rounds": rounds},
        )


class Round(NamedTuple):
    """Seconds, in the order of `FIGURES`."""

    measured: list[float]
    simulated: list[float]
    others: float
    """Share of the machine's CPU time that other programs took meanwhile."""

    @property
    def ratios(self) -> list[float]:
        return [ours / real for ours, real in zip(self.simulated, self.measured, strict=True)]


class Bystanders:
    """Counts the CPU time of programs that are no descendants of this one, from now on."""

    def __init__(self) -> None:
        self._began, self._all, self._own = time.monotonic(), *_cpu_seconds()

    def share(self) -> float:
        """Of the machine's CPU time."""
        all_s, own_s = _cpu_seconds()
        took = (all_s - self._all) - (own_s - self._own)
        return max(took, 0.0) / (time.monotonic() - self._began) / (psutil.cpu_count() or 1)


def _cpu_seconds() -> tuple[float, float]:
    """Of all programs, and of this one with its descendants."""
    times = psutil.cpu_times()
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    own = [each.cpu_times() for each in family]
    busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    return busy, sum(each.user + each.system for each in own)


def requests(rate: float, number: int, options: Any) -> list[LoadRequest]:
    return Load(
        num_prompts=round(rate * options.seconds),
        random_input_len=options.input_len,
        random_output_len=options.output_len,
        random_range_ratio=0.8,
        request_rate=rate,
        seed=round(rate * 1000) + number,
    ).requests()


def deployed(cluster: dict[str, Any]) -> ClusterLayout:
    """What runs there, for the simulation."""
    roles = [worker["role"] for worker in cluster["workers"]]
    told = cluster["placement"]
    policy = placement_policy("cost", told["prefill"], told["decode"])
    return ClusterLayout(roles.count("prefill"), roles.count("decode"), policy, told["disaggregation"])


def simulate(profile: Profile, layout: ClusterLayout, load: Sequence[LoadRequest]) -> list[float]:
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


def show(rounds: dict[float, list[Round]]) -> None:
    table = Table(title="simulated / measured, milliseconds and median ratio", title_justify="left")
    table.add_column("requests/s", justify="right")
    for name in FIGURES:
        table.add_column(name, justify="right")
    for rate, every in rounds.items():
        found = [each for each in every if each.others <= MOST_OTHERS]
        if not found:
            table.add_row(f"{rate:g}", *["others were busy"] * len(FIGURES))
            continue
        measured = np.median([each.measured for each in found], axis=0)
        simulated = np.median([each.simulated for each in found], axis=0)
        ratios = np.median([each.ratios for each in found], axis=0)
        cells = [
            f"{ours * 1e3:.1f} / {real * 1e3:.1f} = {ratio:.2f}"
            for ours, real, ratio in zip(simulated, measured, ratios, strict=True)
        ]
        table.add_row(f"{rate:g}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
