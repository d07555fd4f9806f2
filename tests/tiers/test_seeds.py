"""A run has one seed: what was asked for, a fresh one, or 0."""

from __future__ import annotations

import os

import pytest

from tests.tiers.seeds import VARIABLE, seed, seeds, set_seed


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def test_without_one_all_runs_have_the_same_seeds() -> None:
    assert set_seed(None, fresh=False) == 0
    assert list(seeds(3)) == [0, 1, 2]


def test_a_fresh_seed_is_another_each_time_and_gives_seeds_of_its_own() -> None:
    first = set_seed(None, fresh=True)
    os.environ[VARIABLE] = ""
    second = set_seed(None, fresh=True)
    assert len({0, first, second}) == 3
    assert seeds(40)[0] == 1000 * second


def test_a_seed_that_was_asked_for_or_set_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "17")
    assert set_seed(None, fresh=True) == seed() == 17
    assert set_seed(23, fresh=True) == seed() == 23
    assert list(seeds(2)) == [23000, 23001]
