"""The measurement of the API's overhead, against the real router and the worker of a set rate."""

import time
from pathlib import Path

import pytest

from bench.http_overhead import systems
from bench.http_overhead.__main__ import Round, describe
from bench.http_overhead.measure import CpuTime, Latency, make_prompts, measure_cpu, measure_latency
from bench.peers.process import RunningSystem
from bench.serve.client import Target
from models.bundled import BUNDLED_MODEL

STEP_S = 0.005


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overhead")
    started = systems.tandem(BUNDLED_MODEL, STEP_S, folder / "stamps.json")
    with RunningSystem(started.commands, folder, 60.0) as running:
        target = Target(started.base_url, started.model, ignore_eos=True)
        yield target, running.pids[0], folder / "stamps.json"


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return make_prompts(BUNDLED_MODEL / "tokenizer.json", 6, 100)


def test_what_the_api_adds_to_requests_and_tokens_is_measured(system, prompts):
    target, _, stamps = system
    for _ in range(2):  # the second time beside the stamps of the first
        began = time.monotonic()
        found = measure_latency(target, prompts, stamps)
        assert 0 < found.request_s < time.monotonic() - began
        assert 0 < found.token_s < time.monotonic() - began


def test_the_worker_keeps_its_rate_and_the_routers_cpu_time_is_measured(system, prompts):
    target, pid, _ = system
    many = prompts * 8  # the kernel counts CPU time in steps of 10 ms
    found = measure_cpu(target, pid, many, 40)
    assert found.wall_s >= 39 * STEP_S
    assert 0 < (found.per_request_s + found.per_token_s * 39) * len(many) < 2 * found.wall_s
    assert 90 < found.prompt_tokens < 110


def test_a_request_that_fails_ends_the_measurement(system, prompts):
    _, pid, _ = system
    with pytest.raises(RuntimeError, match="no connection"):
        measure_cpu(Target("http://127.0.0.1:9", "m"), pid, prompts[:1], 4)


def test_prompts_are_of_the_length_asked_for_and_differ():
    prompts = make_prompts(Path(BUNDLED_MODEL) / "tokenizer.json", 64, 2048)
    assert len(set(prompts)) == 64


def test_ratios_are_taken_within_rounds():
    pairs = [(10e-6, 40e-6), (20e-6, 100e-6), (30e-6, 60e-6)]
    rounds = [
        Round(Latency(1e-3, 0.5e-3), *(CpuTime(1e-3, each, 5.0, 2048) for each in pair)) for pair in pairs
    ]
    assert "together 1.50 ms" in describe(rounds)
    assert "router: CPU time 20.0 us per token, 1.00 ms per request" in describe(rounds)
    assert "server: CPU time 60.0 us" in describe(rounds)
    assert describe(rounds).endswith("ratio of the CPU time per token: 0.25")
