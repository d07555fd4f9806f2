"""A sudden drop of a class's acceptance is noticed once, separately for each class."""

from __future__ import annotations

import logging
import random

import pytest

from speculation.account import Account
from speculation.control.estimator import Origin


def feed(account: Account, rate: float, count: int, origin: Origin = "computed", seed: int = 0) -> int:
    """Return how often the account raised the alarm."""
    name = f'spec_acceptance_collapsed_total{{method="eagle",origin="{origin}"}}'
    before, chance = account.counters().get(name, 0), random.Random(seed)
    for _ in range(count):
        account.observed_first("eagle", origin, chance.random() < rate)
    return int(account.counters().get(name, 0) - before)


def test_a_collapse_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    account = Account()
    assert feed(account, 0.7, 2000) == 0
    with caplog.at_level(logging.WARNING, "tandem.speculation"):
        assert feed(account, 0.0, 500) == 1
    (line,) = caplog.messages
    assert "eagle" in line and "computed" in line


def test_a_collapse_is_reported_again_after_a_recovery() -> None:
    account = Account()
    alarms = [feed(account, rate, 1000) for rate in (0.7, 0.1, 0.7, 0.7, 0.7, 0.1)]
    assert alarms == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_chance_raises_no_alarm(rate: float) -> None:
    assert feed(Account(), rate, 20_000) == 0


def test_classes_do_not_hide_each_other() -> None:
    account = Account()
    for _ in range(8):
        assert feed(account, 0.7, 250, "computed") + feed(account, 0.7, 250, "handed_over") == 0
    assert feed(account, 0.7, 500, "computed") == 0
    assert feed(account, 0.0, 500, "handed_over") == 1


def test_log_lines_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    account = Account()
    origins: tuple[Origin, ...] = ("computed", "prefix_hit", "handed_over")
    for origin in origins:
        feed(account, 0.7, 1000, origin)
    assert sum(feed(account, 0.0, 500, origin) for origin in origins) == 3
    assert len(caplog.messages) == 1
