"""Effects of a factorial experiment, on data with known effects."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from bench.five.effects import Effect, all_against_none, effects
from bench.five.factors import TechniqueSet, cells_of

FACTORS = ("a", "b", "c", "d", "e")
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
        for cell in cells_of(FACTORS)
    }


def known(effect: Effect) -> float:
    return MAIN[effect.factors[0]] if len(effect.factors) == 1 else TOGETHER.get(effect.factors, 1.0)


def test_known_effects_are_found() -> None:
    found = effects(FACTORS, made(1, 0.0))
    names = [(name,) for name in FACTORS] + list(combinations(FACTORS, 2))
    assert [effect.factors for effect in found] == names
    assert [effect.ratio for effect in found] == pytest.approx([known(effect) for effect in found])
    b_and_c = TOGETHER["b", "c"]
    with_c = figure(frozenset("bc")) / figure(frozenset("c"))
    without = figure(frozenset("b")) / figure(frozenset())
    assert with_c / without == pytest.approx(b_and_c), "what an interaction says"


def test_differences_between_repeats_are_no_error() -> None:
    for effect in effects(FACTORS, made(3, 1e-6)):
        assert effect.low is not None and effect.high is not None
        assert effect.high / effect.low < 1.0001
        assert effect.ratio == pytest.approx(known(effect), rel=1e-4)


@pytest.mark.parametrize("repeats", [1, 2])
def test_intervals_hold_the_true_effect_at_their_stated_rate(repeats: int) -> None:
    held = [
        effect.low <= known(effect) <= effect.high
        for seed in range(60)
        for effect in effects(FACTORS, made(repeats, 0.1, seed))
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
