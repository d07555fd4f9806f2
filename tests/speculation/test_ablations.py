"""Each rule that the ablation leaves out is still there to be left out."""

from __future__ import annotations

import pytest

from tests.speculation.ablations import RULES, Case
from tests.speculation.simulated import PROFILES

CASE = Case("text", PROFILES[0], 2, 0.2)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_are_planned_without_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](monkeypatch)
    assert CASE.rate(monkeypatch, None, seed=0) > 0.5 * CASE.rate(monkeypatch, 0, seed=0)
