"""All tests that use a shared fixture pay for it."""

from __future__ import annotations

import pytest

from tests.tiers.costs import Cost
from tests.tiers.recorder import Row, shared_out

SERVER, MODEL = "tests::server[0]", "tests::model[0]"


def test_a_shared_fixture_is_paid_by_all_its_tests() -> None:
    rows = [
        Row("first", 0.2, 1.0, {SERVER: (3.0, 6.0), MODEL: (1.5, 1.5)}, [MODEL, SERVER]),
        Row("second", 0.1, 0.5, {}, [MODEL, SERVER]),
        Row("third", 0.1, 0.1, {}, [MODEL]),
        Row("alone", 0.4, 0.4),
    ]
    shares = {name: (cost.cpu_s, cost.wall_s) for name, cost in shared_out(map(vars, rows)).items()}
    assert shares == {
        "first": pytest.approx((2.2, 4.5)),
        "second": pytest.approx((2.1, 4.0)),
        "third": pytest.approx((0.6, 0.6)),
        "alone": (0.4, 0.4),
    }


def test_a_fixture_of_several_modules_is_made_in_each() -> None:
    rows = [Row(name, 0.0, 0.0, {SERVER: (1.0, 1.0)}, [SERVER]) for name in "ab"] + [Row("c", uses=[SERVER])]
    assert shared_out(map(vars, rows))["c"].cpu_s == pytest.approx(2 / 3)


def test_a_fixture_requested_during_a_test_is_its_own() -> None:
    assert shared_out([vars(Row("a", 0.5, 0.5, {SERVER: (1.0, 1.0)}))]) == {"a": Cost(1.5, 1.5)}
