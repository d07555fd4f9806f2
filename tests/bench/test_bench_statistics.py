"""Figures of a run against values worked out by hand."""

from math import inf

import pytest

from bench.compare import SystemMeasurement, compare
from bench.cost import cost_per_million
from bench.serve.client import Record
from bench.serve.statistics import LatencySummary, parse_objectives, summarize


def record(start: float, times: list[float], output_tokens: int | None = None, error: str = "") -> Record:
    end = times[-1] if times else start + 1.0
    count = len(times) if output_tokens is None else output_tokens
    return Record(start, end, times, prompt_tokens=10, output_tokens=count, error=error)


def test_latencies_and_throughput():
    summary = summarize([record(0.0, [0.5, 0.7, 1.0]), record(1.0, [1.1, 1.3, 2.0])])
    assert summary.duration == 2.0
    assert summary.completed == 2 and summary.failed == 0
    assert summary.request_throughput == 1.0
    assert summary.output_throughput == 3.0
    assert summary.total_throughput == 13.0
    assert summary.ttft.mean == pytest.approx(0.3) and summary.ttft.p50 == pytest.approx(0.3)
    assert summary.itl.mean == pytest.approx((0.2 + 0.3 + 0.2 + 0.7) / 4)
    assert summary.tpot.p50 == pytest.approx((0.25 + 0.45) / 2)
    assert summary.e2el.p99 == pytest.approx(1.0)
    assert summary.goodput is None


def test_tokens_that_share_a_piece_count_in_tpot_not_in_itl():
    summary = summarize([record(0.0, [1.0, 2.0], output_tokens=5)])
    assert summary.output_tokens == 5
    assert summary.itl.mean == pytest.approx(1.0)
    assert summary.tpot.mean == pytest.approx(0.25)


def test_failures_count_by_kind_and_in_no_latency():
    records = [record(0.0, [2.0]), record(0.0, [9.0], error="timeout"), record(0.0, [], error="HTTP 429")]
    summary = summarize([*records, record(0.0, [], error="HTTP 429")])
    assert summary.errors == {"timeout": 1, "HTTP 429": 2}
    assert (summary.completed, summary.failed) == (1, 3)
    assert summary.ttft.p99 == 2.0
    assert summary.output_throughput == pytest.approx(1 / 9)


def test_percentiles():
    distribution = LatencySummary.of([float(i) for i in range(101)])
    assert (distribution.p50, distribution.p90, distribution.p99) == (50.0, 90.0, 99.0)
    assert LatencySummary.of([]) == LatencySummary()


def test_nothing_completed():
    summary = summarize([record(0.0, [], error="no connection")])
    assert summary.output_throughput == 0.0 and summary.ttft == LatencySummary()
    assert summarize([]).duration == 0.0


def test_goodput_needs_every_objective():
    quick, slow_start, slow_tokens = (
        record(0.0, [0.1, 0.2, 0.3]),
        record(0.0, [0.5, 0.6, 0.7]),
        record(0.0, [0.1, 1.0, 2.0]),
    )
    objectives = parse_objectives(["ttft:0.2 tpot:0.15"])
    assert objectives == {"ttft": 0.2, "tpot": 0.15}
    assert summarize([quick, slow_start, slow_tokens], objectives).goodput == pytest.approx(1 / 2.0)
    assert parse_objectives(["ttft:0.2,e2el:3", "tpot:1"]) == {"ttft": 0.2, "e2el": 3.0, "tpot": 1.0}


@pytest.mark.parametrize("spec", ["latency:1", "ttft", "ttft:soon"])
def test_bad_objective(spec):
    with pytest.raises(ValueError, match="--goodput"):
        parse_objectives([spec])


def measurement(system: str, number: int, tokens: int) -> SystemMeasurement:
    summary = summarize([record(0.0, [0.5 / tokens, 1.0], output_tokens=tokens)])
    return SystemMeasurement(system, number, 4, summary, 0.0, 0.0)


def test_ratios_are_taken_within_rounds():
    """The machine slows down by half from round to round; the ratio is the same in each."""
    rounds = [(0, 100, 200), (1, 50, 100), (2, 25, 50)]
    measurements = [
        measurement(system, number, tokens)
        for number, base, other in rounds
        for system, tokens in (("base", base), ("other", other))
    ]
    base, other = compare(measurements, "base")
    assert (base.output_throughput, other.output_throughput) == (50.0, 100.0)
    assert base.throughput_ratio is None
    assert other.throughput_ratio == pytest.approx(2.0)
    assert other.ttft_ratio == pytest.approx(0.5)


def test_the_first_system_stays_the_base_if_it_missed_the_first_round():
    measurements = [measurement("other", 0, 300), measurement("other", 1, 300), measurement("base", 1, 100)]
    other, base = compare(measurements, "base")
    assert (other.throughput_ratio, base.throughput_ratio) == (pytest.approx(3.0), None)


def test_a_round_that_one_system_missed_is_left_out_of_the_ratio():
    measurements = [measurement("base", 0, 100), measurement("other", 0, 300), measurement("other", 1, 10)]
    _, other = compare(measurements, "base")
    assert other.rounds == 2
    assert other.throughput_ratio == pytest.approx(3.0)


def test_a_token_costs_its_share_of_the_workers_time():
    assert [cost_per_million(3.6, workers, 1000.0) for workers in (1, 4)] == pytest.approx([1.0, 4.0])
    assert cost_per_million(3.6, 1, 0.0) == inf
