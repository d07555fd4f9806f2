"""`tandem bench figures`: the figures of LLM_SERVING.md, drawn from the results in `bench/results`.

The colours of lines and letters are legible on white and on black.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.report import REPO, RESULTS, show
from planner.profile import DEFAULT_PROFILE, read_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#808080"
COLOURS = ("#2a7fdb", "#e0662f", "#2f9e5f", "#b061d6", "#c9a227", "#d6477f")
STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0.0,
    "font.size": 11,
    "svg.hashsalt": "tandem",
    "svg.fonttype": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}
SHORT = {
    "disaggregation": "split",
    "speculation": "drafts",
    "paging": "paged",
    "sharing": "shared",
    "quantization": "rounded",
}
"""The five techniques in a word."""
FOUR_LOADS = {
    "five": "10 M, chats",
    "five-llama-29m": "29 M, chats",
    "five-llama-29m-long-prompts": "29 M, long prompts",
    "five-llama-29m-long-answers": "29 M, long answers",
}


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name / "results.json").read_text())
    return found


def _cases(name: str) -> list[dict[str, Any]]:
    """Return a sweep's figures, each with the fields of its block added."""
    return [
        {**each, **each["case"]["block"], "K": each["case"]["num_tokens"]}
        for each in _results(name)["figures"]
    ]


def _over_k(axes: Sequence[Axes]) -> None:
    pair, real = axes
    of_pair, of_real = _cases("speculate-amx-light"), _cases("speculate-smollm2")
    for method, colour in zip(("draft_model", "ngram", "eagle"), COLOURS, strict=False):
        for requests, line in ((1, "-"), (2, ":")):
            points = _points(of_pair, "K", drafting=method, concurrency=requests)
            pair.plot(*points, line, color=colour, marker="o", label=f"{method}, {requests}")
    for workload in ("chat", "code", "json", "long-form", "rewrite"):
        real.plot(*_points(of_real, "K", workload=workload), marker="o", label=workload)
    pair.set(title="10 M and its drafts, 1 and 2 requests", xlabel="K", ylabel="speed-up over none")
    pair.set(ylim=(1.1, 3.2))
    real.set(title="SmolLM2-135M, suffix, 1 request", xlabel="K", xscale="log", xticks=[1, 2, 4, 8, 16])
    real.set_xticklabels(["1", "2", "4", "8", "16"])


def _positions(axes: Sequence[Axes]) -> None:
    [axis] = axes
    for case in _cases("speculate-smollm2"):
        if case["K"] == 16 and case["workload"] != "json":
            shares = [100 * share for share in case["by_position"][:8]]
            axis.plot(range(1, len(shares) + 1), shares, marker="o", label=case["workload"])
    axis.set(title="SmolLM2-135M, suffix, K = 16", xlabel="position in the draft", ylabel="accepted, %")


def _over_requests(axes: Sequence[Axes]) -> None:
    speed, cost = axes
    cases = _cases("speculate-amx-light") + _cases("speculate-amx")
    for method in ("ngram", "suffix", "draft_model", "eagle", "medusa", "lookahead"):
        speed.plot(*_points(cases, "concurrency", drafting=method, K=4), marker="o", label=method)
    cost.plot(*_points(cases, "concurrency", "cost", drafting="ngram", K=None), color=INK, label="none")
    for method in ("ngram", "draft_model", "eagle"):
        cost.plot(*_points(cases, "concurrency", "cost", drafting=method, K=4), marker="o", label=method)
    for axis in axes:
        axis.set(xlabel="requests at once", xscale="log", xticks=[1, 2, 4, 8, 16, 64])
        axis.set_xticklabels(["1", "2", "4", "8", "16", "64"])
    speed.set(title="10 M, K = 4", ylabel="speed-up over none")
    cost.set(title="10 M, K = 4", ylabel="cost of a million tokens", ylim=(0, None))


def _goodput(axes: Sequence[Axes]) -> None:
    beside, apart = axes
    replays = _results("goodput-mooncake")["replays"]
    replays += json.loads((RESULTS / "goodput-mooncake" / "nixl.json").read_text())["replays"]
    _over_rates(beside, replays, {"cost": "Tandem", "vllm": "vLLM", "vllm-nixl": "vLLM, split"})
    _over_rates(
        apart, _results("goodput-split")["replays"], {each: each for each in ("whole", "split", "cost")}
    )
    beside.set(title="beside vLLM", ylabel="requests/s within the SLO")
    apart.set(title="whole and split")


def _over_rates(axis: Axes, replays: Sequence[dict[str, Any]], labels: dict[str, str]) -> None:
    """Draw the medians over the rounds."""
    for system, label in labels.items():
        mine = [each for each in replays if each["system"] == system]
        speeds = sorted({each["speedup"] for each in mine})
        rounds = [[each for each in mine if each["speedup"] == speed] for speed in speeds]
        offered, good = (
            [median(each[name] for each in found) for found in rounds] for name in ("offered", "goodput")
        )
        axis.plot(offered, good, marker="o", label=label)
    axis.plot([0, 40], [0, 40], ":", color=INK, label="all in time")
    axis.set(xlabel="requests/s offered")


def _rates(axes: Sequence[Axes]) -> None:
    over, limits = axes
    found = _results("simulate")
    for layout in ("whole", "split", "cost"):
        points = [each for each in found["points"] if each["layout"] == layout]
        rates = [each["rate"] for each in points]
        over.plot(rates, [each["rate"] * each["attainment"] for each in points], marker="o", label=layout)
    over.plot([0, 32], [0, 32], ":", color=INK, label="all in time")
    for load, line in (("summaries", "-"), ("chats", ":")):
        for layout, colour in zip(("whole", "split"), COLOURS, strict=False):
            mine = [each for each in found["highest"] if (each["load"], each["layout"]) == (load, layout)]
            values = [1e3 * each["limit_s"] for each in mine], [each["rate"] for each in mine]
            limits.plot(*values, line, color=colour, marker="o", label=f"{load}, {layout}")
    over.set(
        title="summaries, 10 ms a token", xlabel="requests/s offered", ylabel="requests/s within the SLO"
    )
    limits.set(title="90 % within the SLO", xlabel="SLO on the time per token, ms", ylabel="requests/s")
    limits.set(ylim=(0, 95))


def _effects(axes: Sequence[Axes]) -> None:
    for axis, figure in zip(axes, ("goodput", "TPOT"), strict=True):
        _mains(axis, figure, {label: _results(name)["findings"][0] for name, label in FOUR_LOADS.items()})
    for bar in axes[-1].containers:
        bar.set_label("_")  # the legend of the first panel is for both


def _costs(axes: Sequence[Axes]) -> None:
    batch, techniques = axes
    profile, price_s = read_profile(DEFAULT_PROFILE), 3 / 3600
    costs = profile.costs
    for context in (1152, 8192):
        room = profile.kv_tokens // context
        sizes = [*(2**power for power in range(9) if 2**power <= room), *([room] if room < 256 else [])]
        steps = [costs.step_s + (costs.row_s + costs.context_s * context) * size for size in sizes]
        prices = [price_s * step / size * 1e6 for step, size in zip(steps, sizes, strict=True)]
        batch.plot(sizes, prices, marker="o", label=f"context of {context:,} tokens")
    batch.set(title="H100, calculated", xlabel="requests at once", ylabel="cost of a million tokens")
    batch.set(xscale="log", yscale="log")
    ticks = (1, 4, 16, 64, 256), (0.1, 0.3, 1, 3)
    for axis, places in zip((batch.xaxis, batch.yaxis), ticks, strict=True):
        axis.set_ticks(places, [f"{place:g}" for place in places])
    batch.minorticks_off()
    _mains(techniques, "cost", {label: _results(name)["findings"][0] for name, label in FOUR_LOADS.items()})


def _interactions(axes: Sequence[Axes]) -> None:
    [finding] = _results("five")["findings"]
    for axis, figure in zip(axes, ("goodput", "TPOT"), strict=True):
        _matrix(axis, figure, finding)


def _fleet(axes: Sequence[Axes]) -> None:
    effects, interactions = axes
    findings = {each["workload"]: each for each in _results("five-simulated")["findings"]}
    _mains(effects, "goodput", findings)
    _matrix(interactions, "goodput", findings["chat"])


def _found(finding: dict[str, Any], figure: str) -> list[dict[str, Any]]:
    """Return the effects on a figure."""
    found: list[dict[str, Any]] = next(
        each["effects"] for each in finding["figures"] if each["name"] == figure
    )
    return found


def _mains(axis: Axes, figure: str, findings: dict[str, dict[str, Any]]) -> None:
    """Draw the main effects under several loads, with their intervals."""
    for place, (label, finding) in enumerate(findings.items()):
        mains = [each for each in _found(finding, figure) if len(each["factors"]) == 1]
        at = [row + 0.18 * (place - (len(findings) - 1) / 2) for row in range(len(mains))]
        below = [each["ratio"] - each["low"] for each in mains]
        above = [each["high"] - each["ratio"] for each in mains]
        axis.errorbar([each["ratio"] for each in mains], at, xerr=[below, above], fmt="o", label=label)
        axis.set_yticks(range(len(mains)), [SHORT[each["factors"][0]] for each in mains])
    axis.axvline(1.0, color=INK, linewidth=0.8)
    axis.invert_yaxis()
    axis.set(title=f"{figure} with : without", xlabel="ratio, 95 % intervals", xscale="log")
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8) if axis.get_xlim()[0] < tick < axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _matrix(axis: Axes, figure: str, finding: dict[str, Any]) -> None:
    """Write the main effects on the diagonal and the interactions above it: green if they make the figure
    better, orange if worse, grey if the interval contains 1.
    """
    names = finding["factors"]
    for each in _found(finding, figure):
        row, column = (names.index(each["factors"][place]) for place in (0, -1))
        sure, better = not each["low"] <= 1 <= each["high"], (each["ratio"] > 1) == (figure == "goodput")
        colour = (COLOURS[2] if better else COLOURS[1]) if sure else INK
        weight = "bold" if row == column else "normal"
        axis.text(column, row, f"{each['ratio']:.2f}", color=colour, weight=weight, ha="center", va="center")
    labels, edges = [SHORT[name] for name in names], [place - 0.5 for place in range(len(names) + 1)]
    axis.set_xticks(range(len(names)), labels)
    axis.set_yticks(range(len(names)), labels)
    axis.hlines(edges, edges[0], edges[-1], color=INK, alpha=0.3)
    axis.vlines(edges, edges[0], edges[-1], color=INK, alpha=0.3)
    axis.set(title=f"{figure}, {finding['workload']}", xlim=(edges[0], edges[-1]), ylim=(edges[-1], edges[0]))


def _points(
    cases: Sequence[dict[str, Any]], x: str, y: str = "speedup", **wanted: object
) -> tuple[list[float], list[float]]:
    """Return x and y of the cases with these fields. If x is K, only numeric K count."""
    mine = [case for case in cases if all(case[name] == value for name, value in wanted.items())]
    pairs = sorted({case[x]: case[y] for case in mine if isinstance(case[x], int) and case[x] > 0}.items())
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


FIGURES: dict[str, tuple[int, Callable[[Sequence[Axes]], None]]] = {
    "over-k": (2, _over_k),
    "positions": (1, _positions),
    "over-requests": (2, _over_requests),
    "rates": (2, _rates),
    "goodput": (2, _goodput),
    "costs": (2, _costs),
    "effects": (2, _effects),
    "interactions": (2, _interactions),
    "fleet": (2, _fleet),
}


def figures(
    output: Annotated[Path, typer.Option(help="folder for the figures")] = REPO / "docs" / "images",
) -> None:
    """Draw the figures of LLM_SERVING.md from the results in bench/results."""
    import matplotlib

    matplotlib.use("svg")
    from cycler import cycler
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
        for name, (panels, draw) in FIGURES.items():
            figure, axes = pyplot.subplots(1, panels, figsize=(9, 3.8), squeeze=False, layout="constrained")
            draw(axes[0])
            for axis in axes[0]:
                if axis.lines:
                    axis.grid(alpha=0.3)
                if axis.get_legend_handles_labels()[0]:
                    axis.legend(fontsize=9)
            figure.savefig(output / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
            show(f"written: {output / name}.svg")
