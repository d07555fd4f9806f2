"""The factorial experiment on a simulated fleet."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.five.command import five
from bench.five.factors import FACTORS
from bench.five.measure import ExperimentSetting, Objective
from bench.five.simulated import SimulatedFleet, with_techniques
from planner.profile import DEFAULT_PROFILE, read_profile
from protocol.errors import ConfigError

H100 = read_profile(DEFAULT_PROFILE)
SETTING = ExperimentSetting(DEFAULT_PROFILE, 16384, 0, "", Objective(1.0, 0.015, 0.9), 2.0, 5, simulated=True)
CHAT = SETTING.traffic("chat")


def attainment(rate: float, *techniques: str) -> float:
    return SimulatedFleet(SETTING, CHAT, frozenset(techniques), seed=0).measure(rate).attainment


def test_quantization_halves_bytes_and_leaves_the_rest_to_kv() -> None:
    rounded = with_techniques(H100, frozenset({"quantization", "paging"}), 16384)
    assert (rounded.costs.step_s, rounded.costs.row_s) == (H100.costs.step_s / 2, H100.costs.row_s)
    room = 0.9 * 80e9 - 8.03e9 - 2e9
    assert rounded.kv_tokens * rounded.costs.kv_bytes == pytest.approx(room, rel=0.01), "as its sources say"


def test_drafts_bring_what_they_are_accepted_for() -> None:
    costs = with_techniques(H100, frozenset({"speculation"}), 16384).costs
    assert costs.tokens_per_row == pytest.approx(1 + 0.730 + 0.521 + 0.355, abs=0.002)
    assert costs.step_s == pytest.approx(0.006 + 3 * 0.0005) and costs.row_s == pytest.approx(4 * 34e-6)


def test_a_profile_that_lacks_what_a_technique_changes_is_refused() -> None:
    without_kv = replace(H100, costs=replace(H100.costs, context_s=0.0))
    for lacking, named in ((without_kv, "costs.context_s"), (replace(H100, speculation=None), "no drafts")):
        with pytest.raises(ConfigError, match=f"--simulate: the profile h100-llama-3.1-8b has .*{named}"):
            with_techniques(lacking, frozenset(FACTORS), 16384)


def test_techniques_raise_the_rate_within_the_objective() -> None:
    assert attainment(30.0) < 0.9, "nothing on"
    assert attainment(30.0, "paging", "sharing", "quantization") > 0.9
    assert attainment(30.0, "paging", "sharing") > attainment(30.0, "paging")
    lone = SimulatedFleet(SETTING, CHAT, frozenset(), seed=0).measure(0.5)
    drafts = SimulatedFleet(SETTING, CHAT, frozenset({"speculation"}), seed=0).measure(0.5)
    assert lone.tpot_s / drafts.tpot_s == pytest.approx(2.606 * 6.09 / 7.69, rel=0.02)


def test_an_experiment_is_simulated_and_reported(tmp_path: Path) -> None:
    five(
        workload="long-answers",
        factors="paging,quantization",
        simulate=DEFAULT_PROFILE,
        max_model_len=16384,
        slo_ttft=1.0,
        slo_tpot=0.015,
        seconds=1.0,
        probes=0,
        output=tmp_path,
    )
    text = (tmp_path / "README.md").read_text()
    assert "4 workers of the profile `h100-llama-3.1-8b`, texts 4 times as long" in text
    assert "A load lasts 1 s and begins with empty workers." in text
    assert "| paging+quantization |" in text and "emory" not in text
