"""A run's seed is the requested one, a fresh one, or 0."""

from __future__ import annotations

import os

import pytest

from tests.tiers.seeds import VARIABLE, seed, seeds, set_seed


def test_a_run_has_the_requested_seed_the_inherited_one_a_fresh_one_or_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert set_seed(None, fresh=False) == 0 and list(seeds(3)) == [0, 1, 2]
    os.environ[VARIABLE] = ""
    first = set_seed(None, fresh=True)
    os.environ[VARIABLE] = ""
    second = set_seed(None, fresh=True)
    assert len({0, first, second}) == 3 and seeds(40)[0] == 1000 * second
    os.environ[VARIABLE] = "17"
    assert set_seed(None, fresh=True) == seed() == 17
    assert set_seed(23, fresh=True) == seed() == 23 and list(seeds(2)) == [23000, 23001]
