"""The router's draft plans compared with the best fixed ones, in simulated time."""

from __future__ import annotations

import pytest

from tests.router.drafting_simulator import Drafting, Machine, fixed_plans

MACHINES = {
    "an accelerator": (Machine(), 3.0),
    "whose own drafts are costly": (Machine(level_s=6e-3), 3.0),
    "a slow link": (Machine(level_s=4e-3, wire_s=8e-3), 4.0),
    "a slow draft worker": (Machine(level_s=3e-3, draft_s=2e-3, draft_row_s=0.2e-3), 4.0),
    "a processor": (Machine(2e-3, 1e-3, 0.15e-3, 0.15e-3, 0.3e-3, 0.05e-3, 0.1e-3), 1.5),
}
"""Machines, and the seconds that suffice to tell rates apart."""


@pytest.mark.parametrize("name", MACHINES)
def test_no_fixed_plan_is_much_better(name):
    """Two decode workers share a draft worker, with 1 to 32 requests each."""
    for load in (1, 4, 32):
        machine, seconds = MACHINES[name]
        seconds *= max(8 / load, 1)  # for about as many tokens
        best = max(Drafting(machine, (load, load), plan).run(seconds) for plan in fixed_plans())
        picked = Drafting(machine, (load, load))
        assert picked.run(seconds) >= 0.97 * best, load
        assert sum(target.changes for target in picked.targets) <= 2, "it does not flap"


def test_drafts_follow_the_load():
    machine, seconds = MACHINES["a processor"]
    picked = Drafting(machine, (1, 1))
    for load in (1, 32, 1):
        picked.resize((load, load))
        picked.run(0.5)
        rate = picked.run(4 * seconds)
        best = max(Drafting(machine, (load, load), plan).run(4 * seconds) for plan in fixed_plans())
        assert rate >= 0.96 * best, load
        stops = {target.place.where == "none" for target in picked.targets if target.place}
        assert stops == {load == 32}
    assert [target.changes for target in picked.targets] == [2, 2], "there and back"
