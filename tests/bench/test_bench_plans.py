"""Plans against a real server, and policies over the load."""

from __future__ import annotations

import json
import sys

import pytest

from bench import policies
from bench.plan_check import Round, deployed, simulate
from bench.serve.workload import LoadRequest
from planner.profile import write_profile
from router.placement import RULES
from tests.planner.planned import profile


def test_the_simulation_has_what_is_deployed():
    workers = [{"role": role} for role in ("prefill", "decode", "decode")]
    placement = {"prefill": "least_loaded", "decode": "cost", "disaggregation": True}
    layout = deployed({"workers": workers, "placement": placement})
    assert layout.roles == ["prefill", "decode", "decode"] and layout.disaggregation
    assert (layout.policy.prefill, layout.policy.decode) == (RULES["least_loaded"], RULES["cost"])


def test_a_load_is_simulated_as_it_is_sent():
    workers = [{"role": "decode"}]
    placement = {"prefill": "cost", "decode": "cost", "disaggregation": False}
    load = [LoadRequest([7] * 100, 11, arrival) for arrival in (0.0, 9.0)]
    figures = simulate(profile(), deployed({"workers": workers, "placement": placement}), load)
    assert figures == pytest.approx([0.11, 0.11, 0.011, 0.011])
    assert Round([0.1, 0.11, 0.01, 0.022], figures, 0.0).ratios == pytest.approx([1.1, 1.0, 1.1, 0.5])


def test_policies_are_compared_over_the_load(tmp_path, monkeypatch, capsys):
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 600,
            "output_length": 20,
            "hash_ids": [number % 9, number],
        }
        for number in range(60)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    write_profile(profile(), tmp_path / "profile.json")
    options = ["--trace", str(trace), "--profile", str(tmp_path / "profile.json"), "--speedups", "1,4"]
    options += ["--prefill", "1", "--decode", "2", "--slo-ttft", "1"]
    monkeypatch.setattr(sys, "argv", ["policies", *options])
    policies.main()
    told = capsys.readouterr().out
    assert all(name in told for name in RULES)
    assert "10.2" in told and "40.7" in told, "offered: 60 in 5.9 s, and four times as many"
