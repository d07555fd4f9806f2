"""A run's seed is the requested one, a fresh one, or 0."""

from __future__ import annotations

import os

import pytest

from tests.tiers.seeds import VARIABLE, seed, seeds, set_seed


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def test_without_a_seed_all_runs_have_the_same_seeds() -> None:
    assert set_seed(None, fresh=False) == 0
    assert list(seeds(3)) == [0, 1, 2]


def test_a_fresh_seed_differs_each_time() -> None:
    first = set_seed(None, fresh=True)
    os.environ[VARIABLE] = ""
    second = set_seed(None, fresh=True)
    assert len({0, first, second}) == 3
    assert seeds(40)[0] == 1000 * second


def test_a_requested_or_inherited_seed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "17")
    assert set_seed(None, fresh=True) == seed() == 17
    assert set_seed(23, fresh=True) == seed() == 23
    assert list(seeds(2)) == [23000, 23001]
