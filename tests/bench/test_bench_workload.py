"""Synthetic loads, prompt files and traces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serve.load import LoadOptions
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
