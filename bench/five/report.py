"""Tables of the findings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from bench.five.effects import Effect
from bench.five.factors import TITLES, cells_of, name_of
from bench.five.figures import WorkloadFinding
from bench.five.measure import FLEET, SCALE, CellOutcome, ExperimentSetting
from bench.report import made_by, markdown_table

INTRODUCTION = """\
Each technique is on or off in every combination. A cell's goodput is the highest rate of requests of which
{attainment:.0%} had their first token within {ttft:g} s and the others within {tpot:g} s each; those count.
TTFT and TPOT are medians at one low rate, the same for all cells; the cost is that of a million output tokens
at {price:g} per worker-hour, at the cell's goodput. Effects are ratios: the figure with the technique over
that without, averaged over all states of the others (geometric mean), and for two techniques, how many times
the first one's effect is with the second what it is without. In brackets 95 % intervals; bold where they
leave out 1."""
MEASURED = """
Memory is what the server's processes hold. Requests turn speculation and prefix sharing on and off, so four
cells have one server."""
SIMULATED = """
The cells are simulated: {workers} workers of the profile `{profile}`, texts {scale} times as long as those of
the measured workloads. Speculation is the profile's first method, quantization is one byte a value of weights
and KV, without paging a request takes room for {longest} tokens, and disaggregation has the best number of
prefill workers. A load lasts {seconds:g} s and begins with empty workers. So where answers take nearly as
long, rates are higher than those that workers sustain."""


def as_markdown(
    setting: ExperimentSetting,
    price: float,
    findings: Sequence[WorkloadFinding],
    outcomes: Sequence[CellOutcome],
) -> str:
    objective = setting.objective
    text = INTRODUCTION.format(
        attainment=objective.attainment, ttft=objective.ttft_s, tpot=objective.tpot_s, price=price
    )
    figures = {"workers": FLEET, "profile": setting.model, "scale": SCALE, "longest": setting.max_model_len}
    more = SIMULATED.format(seconds=setting.seconds, **figures) if setting.simulated else MEASURED
    lines = ["# Five techniques", "", made_by(), "", text, more]
    for finding in findings:
        lines += ["", *section(finding)]
        mine = [outcome for outcome in outcomes if outcome.workload == finding.workload]
        lines += ["", _cells(setting, finding, mine, price)]
    return "\n".join(lines) + "\n"


def section(finding: WorkloadFinding) -> list[str]:
    """Return the tables of one workload: main effects, interactions, and all on against all off."""
    rows = []
    for factors in [(name,) for name in finding.factors] + list(combinations(finding.factors, 2)):
        found = [next(e for e in figure.effects if e.factors == factors) for figure in finding.figures]
        rows.append((" x ".join(TITLES.get(name, name) for name in factors), *map(_effect, found)))
    rows.append(("all on over all off", *(f"{figure.all_on:.2f}" for figure in finding.figures)))
    head = ["technique", *(figure.name for figure in finding.figures)]
    lines = [f"## {finding.workload}, {finding.repeats} repeats", "", markdown_table(head, rows)]
    if finding.floored:
        floored = ", ".join(finding.floored)
        lines += ["", f"No rate met the SLO in: {floored}. These count with the lowest tried."]
    return lines


def _effect(effect: Effect) -> str:
    text = f"{effect.ratio:.2f}"
    if effect.is_certain:
        text = f"**{text}**"
    return text if effect.low is None else f"{text} ({effect.low:.2f} to {effect.high:.2f})"


def _cells(
    setting: ExperimentSetting, finding: WorkloadFinding, outcomes: Sequence[CellOutcome], price: float
) -> str:
    """Return the table of the cells, with means over the repeats."""
    memory = () if setting.simulated else ("memory, MiB",)
    head, rows = ("on", "requests/s", "TTFT, ms", "TPOT, ms", *memory, "cost"), []
    for cell in cells_of(finding.factors):
        mine = [each for each in outcomes if frozenset(each.cell) == cell]
        rows.append(
            (
                name_of(cell),
                f"{fmean(each.goodput for each in mine):.2f}",
                f"{fmean(each.light.ttft_s for each in mine) * 1e3:.1f}",
                f"{fmean(each.light.tpot_s for each in mine) * 1e3:.2f}",
                *(f"{fmean(each.memory_bytes for each in mine) / 2**20:.0f}" for _ in memory),
                f"{fmean(each.cost(setting, price) for each in mine):.3g}",
            )
        )
    return markdown_table(head, rows)
