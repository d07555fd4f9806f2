"""Loads of the benchmarks, and the figures of their answers."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.compare import SystemMeasurement, compare
from bench.cost import cost_per_million
from bench.serve.client import Record
from bench.serve.load import LoadOptions
from bench.serve.statistics import LatencySummary, parse_objectives, summarize
from bench.serve.workload import FIRST_ORDINARY_TOKEN, arrivals, from_prompt_file, from_trace, synthetic
from planner.trace import TRACE_BLOCK_TOKENS, TraceFit, read_trace

LINES = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 5]},
    {"timestamp": 3500, "input_length": 1000, "output_length": 900, "hash_ids": [3, 4]},
    {"timestamp": 3500, "input_length": 512, "output_length": 1, "hash_ids": [9]},
]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES) + "\n")
    return path


def test_equal_hash_ids_give_equal_tokens(trace_file):
    first, second, third = from_trace(read_trace(trace_file), TraceFit(), vocab_size=5000, seed=1)
    assert [len(r.prompt) for r in (first, second, third)] == [1100, 1000, 512]
    assert first.prompt[:1000] == second.prompt
    assert third.prompt != first.prompt[:512]
    assert first.prompt[:512] != first.prompt[512:1024]
    assert [r.arrival for r in (first, second, third)] == [0.0, 1.5, 1.5]
    assert [r.output_len for r in (first, second, third)] == [7, 900, 1]


def test_trace_tokens_depend_on_seed_only(trace_file):
    lines = read_trace(trace_file)
    one, again = (from_trace(lines, TraceFit(), 5000, seed=1) for _ in range(2))
    last_alone = from_trace(lines[2:], TraceFit(), 5000, seed=1)
    assert one == again
    assert last_alone[0].prompt == one[2].prompt
    assert from_trace(lines, TraceFit(), 5000, seed=2)[0].prompt != one[0].prompt


def test_trace_is_scaled_cut_and_sped_up(trace_file):
    fit = TraceFit(scale_lengths=0.125, max_input_len=100, max_output_len=50, speedup=10)
    first, second, third = from_trace(read_trace(trace_file), fit, vocab_size=5000, seed=1)
    assert [len(r.prompt) for r in (first, second, third)] == [100, 100, TRACE_BLOCK_TOKENS // 8]
    assert first.prompt == second.prompt
    assert [r.output_len for r in (first, second, third)] == [1, 50, 1]
    assert second.arrival == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1]}', "input_length 600"),
        ("", "holds no requests"),
    ],
)
def test_bad_trace_names_its_line(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=complaint):
        read_trace(path)


def test_trace_limit(trace_file):
    assert len(read_trace(trace_file, limit=2)) == 2


def test_synthetic_prompts():
    requests = synthetic(20, 50, 10, vocab_size=300, seed=5, prefix_len=8, range_ratio=0.5)
    prompts: list[Any] = [r.prompt for r in requests]
    assert len({tuple(p[:8]) for p in prompts}) == 1
    assert len({tuple(p[8:16]) for p in prompts}) == 20
    assert all(8 + 25 <= len(p) <= 8 + 75 for p in prompts) and len({len(p) for p in prompts}) > 3
    assert all(5 <= r.output_len <= 15 for r in requests)
    assert all(FIRST_ORDINARY_TOKEN <= token < 300 for prompt in prompts for token in prompt)
    assert requests == synthetic(20, 50, 10, vocab_size=300, seed=5, prefix_len=8, range_ratio=0.5)


def test_prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def f("}\n\n{"prompt": [1, 2], "max_tokens": 3}\n{"prompt": "x"}\n')
    first, second = from_prompt_file(path, output_len=9, num_prompts=2)
    assert (first.prompt, first.output_len) == ("def f(", 9)
    assert (second.prompt, second.output_len) == ([1, 2], 3)
    path.write_text('{"prompt": "a"}\n{"prompt": 4}\n')
    with pytest.raises(ValueError, match="line 2"):
        from_prompt_file(path, output_len=9)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_spread(burstiness):
    times = np.array(arrivals(20001, rate=8.0, burstiness=burstiness, seed=3))
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_rate_sends_all_at_once():
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


def test_load_keeps_trace_times_unless_a_rate_is_given(trace_file):
    kept = LoadOptions(trace=trace_file).requests()
    replaced = LoadOptions(trace=trace_file, request_rate=float("inf")).requests()
    assert [r.arrival for r in kept] == [0.0, 1.5, 1.5]
    assert [r.arrival for r in replaced] == [0.0, 0.0, 0.0]
    assert [r.prompt for r in kept] == [r.prompt for r in replaced]


def test_warmups_share_no_prefix_with_the_load():
    load = LoadOptions(num_prompts=50)
    requests = load.requests()
    warmups = load.warmups(4, requests[0])
    assert {tuple(r.prompt[:4]) for r in warmups}.isdisjoint(tuple(r.prompt[:4]) for r in requests)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "--burstiness"),
        ({"vocab_size": 3}, "--vocab-size"),
        ({"trace_scale_lengths": 0.0}, "--trace-scale-lengths"),
        ({"trace_speedup": -1.0}, "--trace-speedup"),
    ],
)
def test_bad_options_are_named(trace_file, options, flag):
    trace = trace_file if flag.startswith("--trace") else None
    with pytest.raises(ValueError, match=flag):
        LoadOptions(trace=trace, **options).requests()


def test_prompt_file_and_trace_exclude_each_other(trace_file):
    with pytest.raises(ValueError, match="--prompt-file and --trace"):
        LoadOptions(trace=trace_file, prompt_file=trace_file).requests()


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
