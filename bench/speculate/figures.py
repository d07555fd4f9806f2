"""Figures computed from measurements: medians over rounds, and ratios to the baseline within each round."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from bench.cost import cost_per_million
from bench.speculate.measurement import CaseMeasurement
from bench.speculate.plan import Case, CaseGroup, NumTokens
from bench.turns import known_median


class CaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one case. Times are in seconds; `speedup` is in output tokens per second, `decode_speedup`
    in TPOT.

    `acceptance` is accepted / drafted, `by_position` the share of drafts accepted up to and including each
    position, `tau` is 1 + accepted / draft rounds; both are None if nothing was drafted. `per_forward` is a
    request's tokens per forward after its first, forwards without a draft included. `step_s` is the time of a
    step in which all requests decode. `predicted` is S = tau / (v + K c) from the measured steps: per_forward
    * T(B, 0) / T(B, K). `same` says whether every round's tokens equal the baseline's; `cost` is for a
    million output tokens.
    """

    case: Case
    rounds: int
    throughput: float
    speedup: float
    ttft: float
    tpot: float
    decode_speedup: float
    per_forward: float
    acceptance: float | None
    by_position: list[float]
    tau: float | None
    draft_share: float | None
    predicted: float | None
    step_s: float | None
    same: bool
    cost: float


def figures_of(measurements: Iterable[CaseMeasurement], price: float) -> list[CaseFigures]:
    """Return the figures in the order of the measurements; `price` is the price of a worker-hour."""
    by_case: dict[Case, list[CaseMeasurement]] = defaultdict(list)
    for measurement in measurements:
        by_case[measurement.case].append(measurement)
    figures = []
    for case, mine in by_case.items():
        base = {each.round: each for each in by_case[Case(case.block, None)]}
        figures.append(_figure(case, [(each, base[each.round]) for each in mine], price))
    return figures


Pairs = Sequence[tuple[CaseMeasurement, CaseMeasurement]]
"""A case and its baseline in each round."""


def _figure(case: Case, pairs: Pairs, price: float) -> CaseFigures:
    mine = [each for each, _ in pairs]
    drafted, accepted = sum(each.drafted for each in mine), sum(each.accepted for each in mine)
    rounds = sum(each.draft_rounds for each in mine)
    throughput = statistics.median(each.throughput for each in mine)
    return CaseFigures(
        case=case,
        rounds=len(pairs),
        throughput=throughput,
        speedup=statistics.median(each.throughput / base.throughput for each, base in pairs),
        ttft=statistics.median(each.ttft for each in mine),
        tpot=statistics.median(each.tpot for each in mine),
        decode_speedup=statistics.median(base.tpot / each.tpot for each, base in pairs),
        per_forward=sum(each.step_tokens for each in mine) / sum(each.steps for each in mine),
        acceptance=accepted / drafted if drafted else None,
        by_position=_by_position([each.lengths for each in mine]),
        tau=1 + accepted / rounds if rounds else None,
        draft_share=known_median([each.draft_s and each.draft_s / each.seconds for each in mine]),
        predicted=known_median([_predicted(each, base) for each, base in pairs]),
        step_s=known_median(each.step_s for each in mine),
        same=all(each.digest == base.digest for each, base in pairs),
        cost=cost_per_million(price, 1, throughput),
    )


def _by_position(lengths: Sequence[Sequence[int]]) -> list[float]:
    counts = [sum(column) for column in zip_longest(*lengths, fillvalue=0)]
    return [sum(counts[position:]) / sum(counts) for position in range(1, len(counts))]


def _predicted(mine: CaseMeasurement, base: CaseMeasurement) -> float | None:
    if mine.step_s is None or base.step_s is None:
        return None
    return mine.step_tokens / mine.steps * base.step_s / mine.step_s


class SpeculationVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The best choice for one load and way to speculate.

    `best` is the best K >= 1 at each concurrency, with its speedup. `crossover` is the concurrency from which
    on the lowest concurrency's best K gains nothing, None if it always gains. `auto_worst` is the least
    speedup of auto, `auto_of_best` its least share of the speedup of the best fixed K, K = 0 included; `tax`
    is the cost of K = 0.
    """

    block: CaseGroup
    best: dict[int, tuple[int, float]]
    crossover: float | None
    auto_worst: float | None
    auto_of_best: float | None
    tax: float | None


def verdicts_of(figures: Sequence[CaseFigures]) -> list[SpeculationVerdict]:
    """Return a verdict for each workload, temperature and way to speculate, with the block of the lowest
    concurrency.
    """
    groups: dict[tuple[str, float, str], list[CaseFigures]] = defaultdict(list)
    for figure in figures:
        block = figure.case.block
        groups[block.workload, block.temperature, block.drafting].append(figure)
    return [_verdict(group) for group in groups.values()]


def _verdict(figures: Sequence[CaseFigures]) -> SpeculationVerdict:
    by_k: dict[NumTokens | None, dict[int, float]] = defaultdict(dict)
    for figure in figures:
        by_k[figure.case.num_tokens][figure.case.block.concurrency] = figure.speedup
    fixed = {k: speedups for k, speedups in by_k.items() if isinstance(k, int)}
    lowest = min(figures, key=lambda figure: figure.case.block.concurrency).case.block
    best = {
        concurrency: max(((k, s[concurrency]) for k, s in fixed.items() if k > 0), key=lambda pair: pair[1])
        for concurrency in sorted(by_k[None])
        if any(fixed)
    }
    auto = by_k.get("auto")
    top = {c: max(speedups[c] for speedups in fixed.values()) for c in by_k[None]} if fixed else {}
    return SpeculationVerdict(
        block=lowest,
        best=best,
        crossover=crossover(fixed[best[lowest.concurrency][0]]) if best else None,
        auto_worst=min(auto.values()) if auto else None,
        auto_of_best=min(auto[c] / top[c] for c in top) if auto and top else None,
        tax=1 - min(fixed[0].values()) if 0 in fixed else None,
    )


def crossover(speedups: dict[int, float]) -> float | None:
    """Return the concurrency from which on nothing is gained, interpolated between two measurements on a log
    scale.

    Return None if the highest concurrency still gains.
    """
    points = sorted(speedups.items())
    if points[-1][1] >= 1:
        return None
    last_gain = max((index for index, (_, speedup) in enumerate(points) if speedup >= 1), default=None)
    if last_gain is None:
        return float(points[0][0])
    (low, above), (high, below) = points[last_gain], points[last_gain + 1]
    share = (above - 1) / (above - below)
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
