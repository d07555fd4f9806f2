"""The factorial experiment: its effects and their errors, and a run on a simulated fleet."""

from __future__ import annotations

import math
import random
from itertools import combinations
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.five.command import five
from bench.five.effects import Effect, all_against_none, effects
from bench.five.factors import FACTORS, TechniqueSet, cells_of
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


TECHNIQUES = ("a", "b", "c", "d", "e")
MAIN = {"a": 2.0, "b": 0.5, "c": 1.0, "d": 1.3, "e": 1.0}
TOGETHER: dict[tuple[str, ...], float] = {("a", "d"): 1.5, ("b", "c"): 0.8}


def figure(cell: TechniqueSet) -> float:
    """Return the cell's figure from the factors' mean effects and their interactions."""
    log = 1.0
    for name, ratio in MAIN.items():
        log += math.log(ratio) / 2 * (1 if name in cell else -1)
    for (one, other), ratio in TOGETHER.items():
        log += math.log(ratio) / 4 * (1 if one in cell else -1) * (1 if other in cell else -1)
    return math.exp(log)


def made(repeats: int, spread: float, seed: int = 0) -> dict[TechniqueSet, list[float]]:
    """Return figures with noise from a machine whose speed differs between repeats."""
    rng = random.Random(seed)
    speeds = [math.exp(rng.gauss(0, 0.5)) for _ in range(repeats)]
    return {
        cell: [figure(cell) * speed * math.exp(rng.gauss(0, spread)) for speed in speeds]
        for cell in cells_of(TECHNIQUES)
    }


def known(effect: Effect) -> float:
    return MAIN[effect.factors[0]] if len(effect.factors) == 1 else TOGETHER.get(effect.factors, 1.0)


def test_known_effects_are_found() -> None:
    found = effects(TECHNIQUES, made(1, 0.0))
    names = [(name,) for name in TECHNIQUES] + list(combinations(TECHNIQUES, 2))
    assert [effect.factors for effect in found] == names
    assert [effect.ratio for effect in found] == pytest.approx([known(effect) for effect in found])
    b_and_c = TOGETHER["b", "c"]
    with_c = figure(frozenset("bc")) / figure(frozenset("c"))
    without = figure(frozenset("b")) / figure(frozenset())
    assert with_c / without == pytest.approx(b_and_c), "what an interaction says"


def test_differences_between_repeats_are_no_error() -> None:
    for effect in effects(TECHNIQUES, made(3, 1e-6)):
        assert effect.low is not None and effect.high is not None
        assert effect.high / effect.low < 1.0001
        assert effect.ratio == pytest.approx(known(effect), rel=1e-4)


@pytest.mark.parametrize("repeats", [1, 2])
def test_intervals_hold_the_true_effect_at_their_stated_rate(repeats: int) -> None:
    held = [
        effect.low <= known(effect) <= effect.high
        for seed in range(60)
        for effect in effects(TECHNIQUES, made(repeats, 0.1, seed))
        if effect.low is not None and effect.high is not None
    ]
    assert len(held) == 60 * 15
    assert 0.92 < sum(held) / len(held) < 0.98


def test_as_many_effects_as_cells_leave_no_error_estimate() -> None:
    values = {cell: [figure(cell)] for cell in cells_of("ad")}
    main, _, _ = effects("ad", values)
    assert (main.low, main.high, main.is_certain) == (None, None, False)
    assert not any(
        effect.is_certain for effect in effects("ad", {cell: [1.0, 1.0] for cell in cells_of("ad")})
    )
    assert effects("ad", {cell: [figure(cell)] * 2 for cell in cells_of("ad")})[0].is_certain


def test_all_techniques_on_are_compared_with_all_off() -> None:
    assert all_against_none("a", {frozenset(): [2.0, 8.0], frozenset("a"): [4.0, 64.0]}) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({frozenset("a"): []}, "cell a has 0 repeats, none 2"),
        ({frozenset("ab"): [1.0]}, r"cell a\+b has 1 repeats, none 2"),
        ({frozenset("b"): [1.0, 0.0]}, r"cell b: figures must be above 0 and finite, got \[1.0, 0.0\]"),
    ],
)
def test_a_cell_that_lacks_figures_is_named(changed: dict[TechniqueSet, list[float]], complaint: str) -> None:
    values = {cell: [1.0, 2.0] for cell in cells_of("ab")} | changed
    with pytest.raises(ValueError, match=complaint):
        effects("ab", values)
