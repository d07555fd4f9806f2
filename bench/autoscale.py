"""A simulated day of an autoscaled cluster, beside the best plan in hindsight.

    python -m bench.autoscale [--trace FILE --repeats 4] [--requests 12000] [--output FOLDER]

The load is synthetic, or a trace in Mooncake's form, again and again with fresh texts; both come at the times
of a day with two tides and a rush. Workers are of the bundled profile with costs of a model of 70 B
parameters instead of 8, serve 30 s after they are asked for, and 2 to 16 of them run. The best plan in
hindsight has, in each hour, the fewest workers that attain 0.95 in that hour's requests alone, or nearly what
the most workers attain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec

from bench.day import over_a_day, synthetic
from bench.record import write_results
from bench.scaled_cluster import Elasticity, fewest, scaled, windows
from planner.profile import DEFAULT_PROFILE, Profile, read_profile
from planner.scenarios import Scenario, Slo, Study
from planner.trace import TRACE_BLOCK_TOKENS, TraceFit, TraceRequest, fitted, read_trace
from protocol.scaling import WorkerRange
from router.scaling.decide import ATTAINMENT, ScalingPolicy

SLO = Slo(30.0, 0.15)
MOST = Scenario("conditional", 8, 8)
START_S = 30.0
LARGER = 8.75
"""70 B parameters over 8."""
WINDOW_S = 3600.0
_NUMBERS = 10**7
"""More than the hash ids of a trace."""


def larger(profile: Profile) -> Profile:
    """The same device with the larger model, whose steps take so much longer."""
    names = ("step_s", "row_s", "context_s", "token_s", "attention_s")
    costs = {name: LARGER * getattr(profile.costs, name) for name in names}
    return msgspec.structs.replace(
        profile, costs=msgspec.structs.replace(profile.costs, itl_budget_s=0.1, **costs)
    )


def load(trace: Path | None, repeats: int, requests: int, seed: int) -> Sequence[TraceRequest]:
    if trace is None:
        return synthetic(requests, seed, 12_000, 600)
    once = fitted(read_trace(trace), TraceFit())
    again = [
        TraceRequest(
            each.arrival, each.input_len, each.output_len, [number * _NUMBERS + h for h in each.hash_ids]
        )
        for number in range(repeats)
        for each in once
    ]
    return over_a_day(again, seed)


def measure(study: Study) -> dict[str, float]:
    policy = ScalingPolicy({"prefill": WorkerRange(1, MOST.prefill), "decode": WorkerRange(1, MOST.decode)})
    elasticity = Elasticity(policy, START_S, MOST.prefill + MOST.decode)
    attainment, cluster = scaled(study, elasticity, Scenario("conditional", 1, 1))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        few = list(pool.map(partial(fewest, most=MOST, attainment=ATTAINMENT), windows(study, WINDOW_S)))
    hours, best_hours = cluster.worker_s / 3600, sum(few) * WINDOW_S / 3600
    return {
        "requests": len(study.requests),
        "attainment": attainment,
        "worker_hours": hours,
        "best_hours": best_hours,
        "ratio": hours / best_hours,
        "fixed_hours": max(few) * len(few) * WINDOW_S / 3600,
        "changes": len(cluster.decisions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    requests = load(given.trace, given.repeats, given.requests, given.seed)
    figures = measure(Study(larger(read_profile(DEFAULT_PROFILE)), requests, TRACE_BLOCK_TOKENS, SLO))
    for name, value in figures.items():
        print(f"{name:>14}: {value:.4g}")
    if given.output is not None:
        write_results(given.output, "python -m bench.autoscale", {"options": vars(given), "figures": figures})


if __name__ == "__main__":
    main()
