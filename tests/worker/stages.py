"""Random walks through all messages in all stages, which the tests of each role share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def walk(machine: type[RuleBasedStateMachine]) -> None:
    """Run the machine's rules in many orders."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
