"""What a worker tells its router of its speculation: travels with its state, within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol.codec import encode, worker_to_router
from protocol.speculation import MethodState, SpeculationState, StepTimeState
from protocol.worker_to_router import WorkerState

METHOD = MethodState(
    method="eagle",
    num_requests=3,
    num_tokens=9,
    acceptance=[0.9, 0.75, 0.5],
    start_s=1e-4,
    level_s=1e-3,
    token_s=1e-5,
    by_class={"greedy": [0.95, 0.8], "sampled": [0.6]},
    read_s=1e-6,
)
STATE = SpeculationState(
    max_tokens=8,
    methods=[METHOD],
    step_time=StepTimeState(
        sequences=[1, 2],
        drafted=[0, 1, 2],
        seconds=[[2e-3, 2e-3, 3e-3], [2e-3, 3e-3, 5e-3]],
    ),
)


def state(speculation: SpeculationState | None) -> WorkerState:
    return WorkerState(worker_id="d0", incarnation="i", role="decode", speculation=speculation)


@pytest.mark.parametrize("speculation", [None, SpeculationState(), STATE])
def test_it_travels_in_the_workers_state(speculation: SpeculationState | None) -> None:
    sent = state(speculation)
    assert worker_to_router.decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_tokens",), 64),
        (("max_tokens",), -1),
        (("methods",), [{"method": "eagle"}] * 10),
        (("methods", 0, "method"), "guess"),
        (("methods", 0, "num_requests"), -1),
        (("methods", 0, "acceptance"), [1.5]),
        (("methods", 0, "acceptance"), [0.5] * 64),
        (("methods", 0, "level_s"), -1e-3),
        (("methods", 0, "by_class"), {"random": [0.5]}),
        (("methods", 0, "by_class", "greedy"), [0.5] * 64),
        (("step_time", "sequences"), [1] * 17),
        (("step_time", "drafted"), [1] * 17),
        (("step_time", "seconds"), [[1.0]] * 17),
        (("step_time", "seconds", 0), [-1.0]),
    ],
)
def test_values_out_of_bounds_are_refused(path: tuple[Any, ...], value: object) -> None:
    fields = msgspec.to_builtins(state(STATE))
    target = fields["speculation"]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, WorkerState)
