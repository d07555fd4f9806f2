"""Tests of both roles' stages share this: random walks through all messages, and the table of transitions."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from worker.requests import IllegalTransitionError, StagedRequest


def walk(machine: type[RuleBasedStateMachine]) -> None:
    """Run the machine's rules in many orders."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def check_transition(request: StagedRequest[Any], after: enum.Enum) -> None:
    """Enter the stage `after` if the request's table allows it, else check that this changes nothing."""
    before = request.stage
    ended = type(before)["ENDED"]
    if after in request.next_stages.get(before, ()) or (after is ended and before is not ended):
        request.enter(after)
        assert request.stage is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"{before.name} -> {after.name}"):
            request.enter(after)
        assert request.stage is before
