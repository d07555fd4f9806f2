"""Rates of drafts as requests observe them, and each request's record of its drafts."""

from __future__ import annotations

import random
from collections import Counter
from math import exp, inf, nan
from typing import cast

import pytest

from router.placement.decision import DraftCounts, DraftHistory, DraftPeriod
from router.placement.drafts import (
    NOWHERE,
    DraftDecision,
    DraftFacts,
    DraftKind,
    DraftOption,
    DraftPlace,
    DraftSite,
    ExpectedTokens,
    Prospects,
    SeenRates,
    expect,
)
from tests.router.placed import CPU_LIKE, GPU_LIKE, drafter, target

SWEEP_S = 0.25
NEW = DraftFacts()
TEXTS = 0.2
"""The spread of tokens per second between texts."""

HOLDS: dict[DraftSite, float] = {"none": 1.0, "local": 1.0, "remote": 1.0}
SHARED_CORES: dict[DraftSite, float] = {"none": 1.0, "local": 0.95, "remote": 0.4}
NOT_HERE: dict[DraftSite, float] = {"none": 1.0, "local": 0.4, "remote": 1.1}


class Simulated:
    """A place really yields `truth` times its predicted rate."""

    def __init__(self, model: dict[str, float], truth: dict[DraftSite, float], rows: int) -> None:
        self.truth, self._model = truth, model
        self._random = random.Random(1)
        self.kind = DraftKind()
        self.seconds: Counter[DraftSite] = Counter()
        self._place: DraftPlace | None = None
        self.resize(rows)

    def resize(self, rows: int) -> None:
        """Run this number of requests from now on."""
        self._rows = rows
        plain = Prospects(target(rows, model=self._model), [drafter()])
        self._options = [
            option
            for option in (plain.nowhere(NEW), plain.local(NEW), *plain.elsewhere(NEW))
            if option is not None
        ]

    def run(self, seconds: float) -> float:
        """Return the achieved share of the best place's rate."""
        tokens = 0.0
        for _ in range(round(seconds / SWEEP_S)):
            self._place = self._decide(self._rows).place
            option = self._option(self._place)
            tokens += SWEEP_S * self._rate(option)
            self.seconds[self._place.where] += SWEEP_S
            for _ in range(self._rows):
                self._brings(expect(option, self._rows, 0.0, 0))
        return tokens / seconds / max(map(self._rate, self._options))

    def arrive(self, rows: int) -> None:
        """Add requests one after the other, so that each is planned with those before it."""
        self.resize(rows)
        for expected in [expect(self._decide(each).chosen, each, 0.0, 0) for each in range(1, rows + 1)]:
            self._brings(expected)

    def _decide(self, rows: int) -> DraftDecision:
        at = target(rows, model=self._model)
        prospects = Prospects(at, [drafter()], seen=self.kind.seen)
        return self.kind.decide(DraftFacts(current=self._place), prospects)

    def _brings(self, expected: ExpectedTokens) -> None:
        """Return what one running request yields until the router's next look."""
        rate = next(self._rate(each) for each in self._options if each.place == expected.place)
        tokens = SWEEP_S * rate / self._rows * max(self._random.gauss(1, TEXTS), 0.1)
        self.kind.note(expected, 0.0, cast(int, tokens), self._rows, SWEEP_S)

    def _option(self, place: DraftPlace) -> DraftOption:
        return next(option for option in self._options if option.place == place)

    def _rate(self, option: DraftOption) -> float:
        """Return the true rate. A decode worker does not draft while that is slower than not to."""
        rate, plain = self.truth[option.place.where] * option.rate, self._options[0].rate
        return max(rate, plain) if option.place.where == "local" else rate


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize(("truth", "least"), [(HOLDS, 0.97), (SHARED_CORES, 0.97), (NOT_HERE, 0.96)])
def test_the_best_place_is_found_and_kept(truth, least, rows):
    simulated = Simulated(CPU_LIKE, truth, rows)
    simulated.run(20.0)  # learn first
    assert simulated.run(100.0) >= least, "a place that is 3 % better than another may not be found"


@pytest.mark.parametrize("rows", [2, 32])
def test_a_place_that_was_slow_for_a_moment_is_used_again(rows):
    """The first second, in which kernels may be compiled, finds each place where requests draft slow."""
    simulated = Simulated(GPU_LIKE, dict.fromkeys(HOLDS, 0.3), rows)
    simulated.run(1.0)
    simulated.truth = HOLDS
    simulated.run(110.0)
    assert simulated.run(300.0) >= 0.97


def test_a_place_that_stays_slow_costs_little():
    slow: dict[DraftSite, float] = {"none": 1.0, "local": 0.1, "remote": 0.1}
    assert Simulated(GPU_LIKE, slow, rows=2).run(400.0) >= 0.98


def test_a_place_that_becomes_worse_is_left_until_the_other_does_worse():
    """The draft worker's cores are taken away; later the decode worker becomes as slow."""
    simulated = Simulated(GPU_LIKE | {"level_s": 6e-3}, HOLDS, rows=2)
    slow = SHARED_CORES | {"local": 0.3}
    best: list[tuple[dict[DraftSite, float], DraftSite]]
    best = [(HOLDS, "remote"), (SHARED_CORES, "local"), (slow, "remote")]
    for truth, where in best:
        simulated.truth = truth
        simulated.run(40.0)
        simulated.seconds.clear()
        simulated.run(20.0)
        assert simulated.seconds[where] >= 0.8 * 20.0


def test_poor_drafts_of_a_first_request_do_not_stop_those_of_the_next():
    """Predictions are bold before a worker has drafted. It learns from its own steps what pays."""
    kind, own, at = DraftKind(), DraftPlace("draft_model"), target(1, model=CPU_LIKE)
    kind.seen.note(own, 1, 4.0, seen=100.0, predicted=360.0)
    assert kind.decide(NEW, Prospects(at, seen=kind.seen)).place == own


def test_observations_while_requests_arrive_say_nothing_of_lower_loads():
    simulated = Simulated(CPU_LIKE, HOLDS, rows=1)
    for _ in range(20):
        simulated.arrive(16)
        simulated.run(1.0)
    assert simulated._place is not None
    assert simulated.kind.seen.correction(simulated._place, 1) == pytest.approx(1.0, abs=0.1)
    simulated.resize(1)
    assert simulated.run(4.0) >= 0.97


def test_a_place_that_loses_at_high_loads_is_used_at_low_ones():
    """Observations at one load say nothing about others."""
    simulated = Simulated(GPU_LIKE | {"level_s": 6e-3}, HOLDS | {"remote": 0.2}, rows=4)
    simulated.run(10.0)
    assert simulated.kind.seen.correction(simulated._options[2].place, 4) < 0.5
    simulated.truth = HOLDS
    simulated.resize(1)
    assert simulated.run(10.0) >= 0.97


def test_a_prediction_that_was_far_too_high_is_soon_forgotten():
    seen, own = SeenRates(), DraftPlace("draft_model")
    seen.note(own, 1, 0.25, seen=100.0, predicted=1e9)
    for _ in range(8):
        seen.note(own, 1, 0.25, seen=100.0, predicted=100.0)
    assert seen.correction(own, 1) > 0.85


def test_a_stalled_worker_and_impossible_predictions_leave_a_usable_rate():
    seen, own = SeenRates(), DraftPlace("draft_model")
    for predicted in (nan, inf, 0.0, -1.0):
        seen.note(own, 1, 1.0, seen=5.0, predicted=predicted)
    assert seen.correction(own, 1) == 1.0
    seen.note(own, 1, 1.0, seen=0.0, predicted=100.0)
    assert seen.correction(own, 1) == 0.01


def test_observations_at_about_the_load_count():
    seen, (own, other) = SeenRates(), (DraftPlace("draft_model"), DraftPlace("draft_model", "draft-0"))
    seen.note(own, 4, 4.0, seen=50.0, predicted=100.0)
    seen.note(own, 64, 10.0, seen=900.0, predicted=1.0)
    corrections = {rows: seen.correction(own, rows) for rows in (1, 4, 4.5, 8, 64)}
    assert corrections == {1: 1.0, 4: 0.5, 4.5: 0.5, 8: 1.0, 64: 1.0}, "that at 64 was too short"
    assert seen.correction(other, 4) == 1.0


def test_old_observations_fade():
    seen, own = SeenRates(), DraftPlace("draft_model")
    for seconds, gain in ((1000.0, 1.0), (4.0, 2.0)):
        for _ in range(round(seconds)):
            seen.note(own, 1, 1.0, seen=gain * 100.0, predicted=100.0)
    assert seen.correction(own, 1) == pytest.approx(2 - exp(-4 / 8), rel=0.02)


def test_rates_count_from_the_first_token():
    kind, own = DraftKind(), DraftPlace("draft_model")
    planned = ExpectedTokens(own, rows=1, per_s=100.0, since=0.0, num_tokens=1)
    kind.note(planned, answered_at=1000.0, num_tokens=101, rows=1, now=1002.0)
    assert kind.seen.correction(own, 1) == pytest.approx(0.5)


def test_the_expected_rate_is_the_uncorrected_prediction():
    """For one request of the batch."""
    option = DraftOption(NOWHERE, rate=90.0, worth=70.0, tokens_per_step=1.0, correction=0.9)
    assert expect(option, 2.0, 5.0, 7) == (NOWHERE, 2.0, pytest.approx(50.0), 5.0, 7)


PLAIN = DraftOption(NOWHERE, rate=100.0, worth=100.0, tokens_per_step=1.0)
REMOTE = DraftOption(
    DraftPlace("draft_model", "draft-0"),
    rate=300.0,
    worth=250.0,
    tokens_per_step=2.5,
    max_tokens=8,
    correction=0.9,
)


def period(option: DraftOption, reason: str, began: DraftCounts, ended: DraftCounts) -> DraftPeriod:
    begun = DraftPeriod(DraftDecision(option, (PLAIN, REMOTE), reason), "decode-0", None, 0, began)
    begun.ended = ended
    return begun


def test_each_period_has_its_own_counts_and_the_latest_what_was_compared():
    history = DraftHistory()
    assert history.as_json() is None and history.current is None and history.plan is None
    middle = DraftCounts(10, 10, 0, 0)
    history.periods.append(period(PLAIN, "first", DraftCounts(), middle))
    assert history.current is None and history.plan is None, "it has ended"
    history.periods.append(period(REMOTE, "then", middle, DraftCounts(14, 20, 12, 6)))
    history.num_replans += 1
    nowhere = {"where": "none", "worker": None, "method": None, "max_tokens": 0}
    elsewhere = {"where": "remote", "worker": "draft-0", "method": "draft_model", "max_tokens": 8}
    counts = ["predicted_tokens_per_step", "steps", "tokens", "drafted_tokens", "accepted_tokens"]
    predicted = ["tokens_per_s", "tokens_per_s_with_catch_up", "tokens_per_step", "seen_to_predicted"]
    assert history.as_json() == {
        "replans": 1,
        "periods": [
            nowhere | dict(zip(counts, [1.0, 10, 10, 0, 0], strict=True)),
            elsewhere | dict(zip(counts, [2.5, 4, 10, 12, 6], strict=True)),
        ],
        "chosen": elsewhere | {"predicted": dict(zip(predicted, [300.0, 250.0, 2.5, 0.9], strict=True))},
        "alternatives": [
            nowhere | {"predicted": dict(zip(predicted, [100.0, 100.0, 1.0, 1.0], strict=True))}
        ],
        "reason": "then",
    }
