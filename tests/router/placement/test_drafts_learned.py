"""Observations correct wrong predictions about draft places, for a decode worker in simulated time."""

from __future__ import annotations

import random
from collections import Counter
from math import exp, inf, nan

import pytest

from router.placement.drafts.kinds import TRIAL_S, DraftKind, ExpectedTokens, expect
from router.placement.drafts.prospects import (
    NOWHERE,
    DraftDecision,
    DraftFacts,
    DraftOption,
    DraftPlace,
    DraftSite,
    Prospects,
    SeenRates,
)
from tests.router.drafted import CPU_LIKE, GPU_LIKE, drafter, target

SWEEP_S = 0.25
NEW = DraftFacts()
TEXTS = 0.2
"""The spread of tokens per second between texts."""

HOLDS: dict[DraftSite, float] = {"none": 1.0, "local": 1.0, "remote": 1.0}
SHARED_CORES: dict[DraftSite, float] = {"none": 1.0, "local": 0.95, "remote": 0.4}
BAD_START: dict[DraftSite, float] = {"none": 1.0, "local": 2.2, "remote": 0.9}
NOT_HERE: dict[DraftSite, float] = {"none": 1.0, "local": 0.4, "remote": 1.1}


class Simulated:
    """A place really yields `truth` times its predicted rate."""

    def __init__(
        self, model: dict[str, float], truth: dict[DraftSite, float], rows: int, seed: int = 1
    ) -> None:
        self.truth, self._model = truth, model
        self._random = random.Random(seed)
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
        self.kind.note(expected, 0.0, tokens, self._rows, SWEEP_S)

    def _option(self, place: DraftPlace) -> DraftOption:
        return next(option for option in self._options if option.place == place)

    def _rate(self, option: DraftOption) -> float:
        return self.truth[option.place.where] * option.rate


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("truth", [HOLDS, SHARED_CORES, BAD_START, NOT_HERE])
def test_the_best_place_is_found_and_kept(truth, rows):
    simulated = Simulated(CPU_LIKE, truth, rows)
    simulated.run(20.0)  # learn first
    assert simulated.run(100.0) >= 0.97


def test_a_place_far_worse_is_hardly_tried():
    simulated = Simulated(GPU_LIKE, HOLDS, rows=4)
    simulated.run(100.0)
    assert 0 < simulated.seconds["none"] <= 4.0


def test_changes_are_noticed():
    """The draft worker's cores are taken away, and come back."""
    simulated = Simulated(GPU_LIKE | {"level_s": 6e-3}, HOLDS, rows=2)
    for truth, where in ((HOLDS, "remote"), (SHARED_CORES, "local"), (HOLDS, "remote")):
        simulated.truth = truth
        simulated.run(60.0)
        simulated.seconds.clear()
        simulated.run(40.0)
        assert simulated.seconds[where] >= 0.8 * 40.0


def test_observations_while_requests_arrive_say_nothing_of_lower_loads():
    simulated = Simulated(CPU_LIKE, HOLDS, rows=1)
    for _ in range(20):
        simulated.arrive(16)
        simulated.run(1.0)
    assert simulated.kind.seen.correction(simulated._place, 1) == pytest.approx(1.0, abs=0.1)
    simulated.resize(1)
    assert simulated.run(4.0) >= 0.97


def test_a_place_that_loses_at_high_loads_is_used_at_low_ones():
    """Observations of one place at this load say more about another than that place's own at a far load."""
    simulated = Simulated(CPU_LIKE, SHARED_CORES | {"local": 0.2}, rows=16)
    simulated.run(60.0)
    assert simulated.kind.seen.correction(simulated._options[1].place, 16) < 0.5
    simulated.truth = HOLDS
    simulated.resize(1)
    assert simulated.run(10.0) >= 0.9, "one of its trials counted"


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


def test_the_observation_at_the_nearest_load_counts():
    seen, (own, other) = SeenRates(), (DraftPlace("draft_model"), DraftPlace("draft_model", "draft-0"))
    assert seen.correction(own, 4) == 1.0
    seen.note(own, 4, 4.0, seen=50.0, predicted=100.0)
    assert seen.correction(own, 4) == seen.correction(own, 64) == 0.5
    assert seen.correction(other, 4) == 1.0
    seen.note(other, 64, 64.0, seen=300.0, predicted=100.0)
    seen.note(own, 64, 10.0, seen=900.0, predicted=1.0)
    assert seen.correction(own, 64) == 0.5, "that was too short, for one of 64"
    assert (seen.knows(own, 4), seen.knows(own, 64), seen.knows(other, 4)) == (True, False, False)
    assert seen.correction(other, 1) == 3.0
    for rows, tokens in ((1, 10.0), (6, 20.0), (16, 30.0)):
        seen.note(own, rows, rows, seen=tokens, predicted=10.0)
    nearest = {1: 1.0, 4: 0.5, 5: 2.0, 6: 2.0, 11: 3.0, 16: 3.0, 64: 3.0}
    assert {rows: seen.correction(own, rows) for rows in nearest} == nearest


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


def test_trials_do_not_overlap():
    kind = DraftKind()
    kind.pass_time(100.0)
    places = [NOWHERE, DraftPlace("draft_model"), DraftPlace("draft_model", "draft-0")]
    best, *others = (DraftOption(place, 100.0, 100.0, 1.0) for place in places)
    idle = best._replace(worth=0.0)
    for decision in (DraftDecision(best, (best,)), DraftDecision(idle, (idle, *others))):
        kind._consider_trial(decision)
        assert kind.trial is None
    kind._consider_trial(DraftDecision(best, (best, *others)))
    first = kind.trial
    kind._consider_trial(DraftDecision(best, (best, *others)))
    assert kind.trial == first is not None
    kind.pass_time(TRIAL_S)
    assert kind.trial is None


def test_an_equally_good_place_is_tried_every_ten_seconds():
    began = []
    kind = DraftKind(began.append)
    best, other = (DraftOption(place, 100.0, 100.0, 1.0) for place in (NOWHERE, DraftPlace("draft_model")))
    for _ in range(1000):
        kind.pass_time(1.0)
        kind._consider_trial(DraftDecision(best, (best, other)))
    assert 80 <= len(began) <= 111


def test_the_expected_rate_is_the_uncorrected_prediction():
    """For one request of the batch."""
    option = DraftOption(NOWHERE, rate=90.0, worth=70.0, tokens_per_step=1.0, correction=0.9)
    assert expect(option, 2.0, 5.0, 7) == (NOWHERE, 2.0, pytest.approx(50.0), 5.0, 7)
