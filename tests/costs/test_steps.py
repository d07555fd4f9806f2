"""Step costs are fitted to measured steps."""

from __future__ import annotations

import random
from math import e, exp
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from costs.steps import DECODE_SCALING, MEMORY, PREFILL_SCALING, Regression, StepTimes, StepWork, work_of
from protocol.costs import StepCosts

TRUE = StepCosts(step_s=2e-3, row_s=1e-4, context_s=5e-7, chunk_s=5e-4, token_s=8e-5, attention_s=2e-7)
WEIGHTS = ("step_s", "row_s", "context_s", "chunk_s", "token_s", "attention_s")
SEED = [
    StepWork(1, 64),
    StepWork(8, 512),
    StepWork(8, 8192),
    StepWork(0, 0, 16, 128),
    StepWork(0, 0, 128, 8192),
    StepWork(0, 0, 128, 139264),
]


def seconds(work: StepWork, costs: StepCosts = TRUE) -> float:
    chunk = costs.chunk_s + costs.token_s * work.tokens + costs.attention_s * work.pairs
    return costs.decode_s(work.rows, work.context) + (chunk if work.tokens else 0.0)


def seeded(costs: StepCosts) -> StepTimes:
    times = StepTimes(512, 100)
    times.seed([(work, seconds(work, costs)) for work in SEED])
    return times


def weights(costs: StepCosts) -> list[float]:
    return [getattr(costs, name) for name in WEIGHTS]


def run(times: StepTimes, costs: StepCosts, count: int, noise: float = 0.0, most_rows: int = 16) -> None:
    rng = random.Random(0)
    for index in range(count):
        rows = rng.randint(1, most_rows)
        tokens = rng.randint(2, 512) if index % 5 == 0 else 0
        work = StepWork(rows, rows * rng.randint(10, 2000), tokens, tokens * rng.randint(1, 2000))
        times.observe(work, seconds(work, costs) * (1 + rng.uniform(-noise, noise)))
        if index % 100 == 99:
            times.costs()


def test_the_work_of_a_step_is_counted_by_kind():
    """Two sequences decode, one of them the last token of its prompt; two prompts go on."""
    sequences = [SimpleNamespace(num_computed=count) for count in (100, 31, 0, 64)]
    assert work_of(sequences, [1, 1, 64, 32]) == (2, 131, 96, 64 * 32 + 32 * (64 + 16))


def test_the_measurements_at_start_are_enough():
    assert weights(seeded(TRUE).costs()) == pytest.approx(weights(TRUE), rel=1e-3)


def test_a_worker_may_have_no_room_to_measure_steps() -> None:
    times = StepTimes(512, 100)
    times.seed([])
    run(times, TRUE, 300)
    assert times.costs().decode_s(4, 2000) == pytest.approx(TRUE.decode_s(4, 2000), rel=0.05)


def test_costs_follow_a_machine_that_becomes_slower():
    times = seeded(TRUE)
    slow = StepCosts(**{name: 3 * getattr(TRUE, name) for name in WEIGHTS})
    run(times, slow, 3000, noise=0.1)
    found = times.costs()
    for work in SEED[:4]:
        assert seconds(work, found) == pytest.approx(seconds(work, slow), rel=0.15)
    assert found.error < 0.12


def test_costs_of_work_that_has_not_run_for_long_stay():
    """Only one sequence decodes, so the costs of rows and prompts are known from the start alone."""
    times = seeded(TRUE)
    for index in range(20_000):
        times.observe(StepWork(1, 100 + index % 50), seconds(StepWork(1, 100 + index % 50)))
        if index % 500 == 0:
            times.costs()
    assert weights(times.costs()) == pytest.approx(weights(TRUE), rel=0.05)


def test_no_weight_is_negative_and_a_pause_counts_little():
    times = seeded(TRUE)
    for index in range(1000):
        work = StepWork(4, 400 + index % 7, (index % 3) * 100, (index % 3) * 5000)
        falling = 5.0 if index == 500 else 3e-3 - 1e-5 * (index % 7) - 1e-6 * work.tokens
        times.observe(work, falling)
    found = times.costs()
    assert min(weights(found)) >= 0
    assert seconds(StepWork(4, 400), found) == pytest.approx(3e-3, rel=0.2)


def test_a_regression_remembers_as_many_rows_as_it_says():
    """Its value minimizes the relative errors of rows, of which the older weigh 1/e."""
    memory = 100
    fit = Regression(1, memory)
    fit.learn(np.ones((5000, 1)), np.ones(5000))
    fit.learn(np.ones((memory, 1)), np.full(memory, 2.0))
    old = exp(-1)
    new = 1 - old
    assert fit.weights[0] == pytest.approx((old + new / 2) / (old + new / 4), rel=0.01)


def test_the_tokens_that_steps_bring_are_averaged_over_the_latest():
    times = seeded(TRUE)
    work = StepWork(4, 400)
    for accepted in (12, 0):
        for _ in range(round(MEMORY)):
            times.observe(work, seconds(work), accepted=accepted)
        found = times.costs().tokens_per_row
        # After the second half, the first weighs 1/e of it.
        assert found == pytest.approx(1 + 3 * (1.0 if accepted else 1 / (e + 1)), rel=0.01)


def test_the_error_is_that_of_the_latest_steps():
    """They are judged together, by what was known before them."""
    times, work = seeded(TRUE), StepWork(4, 400)
    for took, error in ((2.0, 1 / 2), (1.0, 1 / 2 / (e + 1))):
        before = seconds(work, times.costs())
        for _ in range(round(MEMORY)):
            times.observe(work, took * before)
        assert times.costs().error == pytest.approx(error, rel=0.01)


def run_lending(times: StepTimes, costs: StepCosts, count: int, *, lent_share: float) -> None:
    """Observe `count` steps, a share of them on twice the cores."""
    rng = random.Random(0)
    for index in range(count):
        rows = rng.randint(1, 16)
        tokens = 64 if index % 5 == 0 else 0
        work = StepWork(rows, rows * rng.randint(10, 500), tokens, 100 * tokens)
        spread = 2.0 if rng.random() < lent_share else 1.0
        times.observe(work, seconds(work, costs.on(spread)), spread=spread)
        if index % 100 == 99:
            times.costs()


def test_the_gain_from_lent_cores_is_learned() -> None:
    times = seeded(TRUE)
    assert times.costs().decode_scaling == times.costs().prefill_scaling == 0.0, "none are lent"
    times.borrows = True
    told = times.costs()
    assert (told.decode_scaling, told.prefill_scaling) == (DECODE_SCALING, PREFILL_SCALING), "none were yet"
    really = msgspec.structs.replace(TRUE, decode_scaling=0.3, prefill_scaling=0.7)
    run_lending(times, really, 3000, lent_share=0.5)
    found = times.costs()
    assert found.decode_scaling == pytest.approx(0.3, abs=0.03)
    assert found.prefill_scaling == pytest.approx(0.7, abs=0.05)
    for spread in (1.0, 2.0):
        for work in (StepWork(1, 100), StepWork(16, 1600), StepWork(8, 800, 64, 6400)):
            assert seconds(work, found.on(spread)) == pytest.approx(
                seconds(work, really.on(spread)), rel=0.05
            )
    assert found.error < 0.1


def test_steps_on_lent_cores_correct_the_costs_on_own_cores() -> None:
    """The measurements at start were taken on a busy machine, and every later step runs on lent cores."""
    slow = StepCosts(**{name: 3 * getattr(TRUE, name) for name in WEIGHTS})
    times = seeded(slow)
    times.borrows = True
    scaled = msgspec.structs.replace(TRUE, decode_scaling=DECODE_SCALING, prefill_scaling=PREFILL_SCALING)
    run_lending(times, scaled, 4000, lent_share=1.0)
    for work in (StepWork(8, 2000), StepWork(8, 2000, 64, 6400)):
        assert seconds(work, times.costs().on(2.0)) == pytest.approx(seconds(work, scaled.on(2.0)), rel=0.1)
        assert seconds(work, times.costs()) < 1.7 * seconds(work)


def test_the_tokens_that_fit_a_time_take_that_time():
    for before in (0, 500, 10_000):
        for tokens in (1, 37, 400):
            needed = TRUE.chunks_s(tokens, before, 512)
            assert TRUE.fitting_tokens(needed * 1.0001, before) == tokens
    assert TRUE.fitting_tokens(0.0, 0) == 0
    assert StepCosts(token_s=0.0, attention_s=0.0).fitting_tokens(1.0, 0) > 10**6
