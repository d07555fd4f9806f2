"""Shows why speculation stops paying: step times over rows, from results of `tandem bench speculate`.

    tandem bench roofline

A step of few rows takes as long as reading the weights, so that further rows are nearly free; a step of many
rows takes as long as computing them (Williams et al. 2009). Drafts pay as long as a step with drafts brings
more tokens than it takes times as long as a plain step. Writes `roofline.svg` into `bench/results`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.record import RESULTS
from bench.speculate.measurement import Measurement
from bench.speculate.plan import Case

RUNS = ("speculate-amx-light", "speculate-amx")
"""Results of one machine and commit: few requests, many requests."""
METHODS = ("ngram", "draft_model")
K = 4


class DraftedSteps(NamedTuple):
    """Steps of `requests` requests, plain and with K drafted tokens for each.

    Times are in seconds, drafting included; `rows` is the rows of a step with drafts, `tokens` the tokens
    that it brings to a request.
    """

    requests: int
    plain_s: float
    drafted_s: float
    rows: float
    tokens: float

    @property
    def ratio(self) -> float:
        """Return v + K c: the time of a step with drafts divided by that of a plain step."""
        return self.drafted_s / self.plain_s

    @property
    def speedup(self) -> float:
        """Return the speedup of decoding: tokens per request and step, divided by the relative step time."""
        return self.tokens / self.ratio


def read(results: Path = RESULTS) -> list[Measurement]:
    runs = [msgspec.json.decode((results / run / "results.json").read_bytes()) for run in RUNS]
    return [msgspec.convert(each, Measurement) for run in runs for each in run["measurements"]]


def loads_of(measurements: Sequence[Measurement], method: str) -> list[DraftedSteps]:
    """Return the loads by number of requests, without loads in which all requests never decoded in the same
    step.
    """
    mine = [each for each in measurements if each.case.block.drafting == method]
    loads = []
    for block in dict.fromkeys(each.case.block for each in mine):
        plain = [each for each in mine if each.case == Case(block, None)]
        drafted = [each for each in mine if each.case == Case(block, K)]
        seconds = [each.step_s for each in drafted if each.step_s is not None]
        if seconds:
            steps = sum(each.steps for each in drafted)
            loads.append(
                DraftedSteps(
                    requests=block.concurrency,
                    plain_s=statistics.median(each.step_s for each in plain if each.step_s is not None),
                    drafted_s=statistics.median(seconds),
                    rows=block.concurrency * (1 + sum(each.drafted for each in drafted) / steps),
                    tokens=sum(each.step_tokens for each in drafted) / steps,
                )
            )
    return sorted(loads)


def plot(loads: dict[str, list[DraftedSteps]], path: Path) -> None:
    """Plot rows per second over rows, under both roofs (left), and step time and tokens over requests
    (right).
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "roofline"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _roofs(left, loads["ngram"])
    for colour, (method, each) in zip(("tab:blue", "tab:orange"), loads.items(), strict=True):
        requests = [load.requests for load in each]
        right.plot(
            requests, [load.ratio for load in each], "-o", color=colour, label=f"{method}: time, plain steps"
        )
        right.plot(
            requests,
            [load.tokens for load in each],
            "--",
            color=colour,
            label=f"{method}: tokens of a request",
        )
    right.set_title(f"a step with {K} tokens drafted")
    right.set_xlabel("requests at once")
    right.set_ylim(0, 7)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _roofs(axes: Any, loads: Sequence[DraftedSteps]) -> None:
    plain = [(load.requests, load.requests / load.plain_s) for load in loads]
    drafted = [(load.rows, load.rows / load.drafted_s) for load in loads]
    fewest, slowest = plain[0]
    most = max(rate for _, rate in plain + drafted)
    widest = max(rows for rows, _ in plain + drafted)
    axes.plot(
        [fewest, fewest * most / slowest],
        [slowest, most],
        ":k",
        label="roof: a step takes what one row takes",
    )
    axes.plot(
        [fewest * most / slowest, widest],
        [most, most],
        "-.k",
        label="roof: most rows a second that were seen",
    )
    axes.plot(*zip(*plain, strict=True), "o-", color="tab:gray", label="plain")
    axes.plot(*zip(*drafted, strict=True), "s-", color="tab:blue", label=f"ngram, {K} tokens drafted")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("rows a second")
    axes.set_xlabel("rows in a step")


def main() -> None:
    """Print and plot why speculation stops paying, from results of `tandem bench speculate`."""
    measurements = read()
    loads = {method: loads_of(measurements, method) for method in METHODS}
    for method, each in loads.items():
        for load in each:
            print(
                f"{method} {load.requests}: plain {load.plain_s * 1e3:.2f} ms, "
                f"drafted {load.drafted_s * 1e3:.2f} ms, "
                f"ratio {load.ratio:.2f}, {load.tokens:.2f} tokens, speed-up of decoding {load.speedup:.2f}"
            )
    plot(loads, RESULTS / "roofline.svg")
