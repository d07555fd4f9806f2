"""A sudden drop of a class's acceptance is noticed once, separately for each class."""

from __future__ import annotations

import logging
import random

import pytest

from speculation.account import Account, Origin
from speculation.collapse import CollapseWatch


def feed(watch: CollapseWatch, rate: float, count: int, origin: Origin = "computed", seed: int = 0) -> int:
    """Return how often the watch raised the alarm."""
    chance = random.Random(seed)
    return sum(watch.observe("eagle", origin, chance.random() < rate) for _ in range(count))


def test_a_collapse_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CollapseWatch()
    assert feed(watch, 0.7, 2000) == 0
    with caplog.at_level(logging.WARNING, "tandem.speculation"):
        assert feed(watch, 0.0, 500) == 1
    (line,) = caplog.messages
    assert "eagle" in line and "computed" in line


def test_a_collapse_is_reported_again_after_a_recovery() -> None:
    watch = CollapseWatch()
    alarms = [feed(watch, rate, 1000) for rate in (0.7, 0.1, 0.7, 0.7, 0.7, 0.1)]
    assert alarms == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_chance_raises_no_alarm(rate: float) -> None:
    assert feed(CollapseWatch(), rate, 20_000) == 0


def test_classes_do_not_hide_each_other() -> None:
    watch = CollapseWatch()
    for _ in range(8):
        assert feed(watch, 0.7, 250, "computed") + feed(watch, 0.7, 250, "handed_over") == 0
    assert feed(watch, 0.7, 500, "computed") == 0
    assert feed(watch, 0.0, 500, "handed_over") == 1


def test_log_lines_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    watch = CollapseWatch()
    origins: tuple[Origin, ...] = ("computed", "prefix_hit", "handed_over")
    for origin in origins:
        feed(watch, 0.7, 1000, origin)
    assert sum(feed(watch, 0.0, 500, origin) for origin in origins) == 3
    assert len(caplog.messages) == 1


def test_the_counter_names_the_class() -> None:
    account = Account()
    account.collapsed("eagle", "handed_over")
    name = 'spec_acceptance_collapsed_total{method="eagle",origin="handed_over"}'
    assert account.counters() == {name: 1.0}
