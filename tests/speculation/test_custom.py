"""Custom drafters: which are accepted, and how invalid drafts are handled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.errors import ConfigError
from speculation.drafter import Drafter
from speculation.sources import problem
from tests.speculation.small_engine import VOCAB_SIZE, ask, drafting, native_config, prompt_of, run, tokens

HERE = "tests.speculation.test_custom"


class WrongDrafter(Drafter):
    """Drafts what no step can run, and sometimes what one can."""

    def __init__(self, *arguments: Any) -> None:
        self._made = 0

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        self._made += 1
        kinds = [
            Draft([5] * (counts[0] + 1)),
            Draft([VOCAB_SIZE]),
            Draft([-1]),
            Draft([]),
            Draft([5, 6], parents=[-1]),
            Draft([5, 6], parents=[1, -1]),
            Draft([5]),
        ]
        return [kinds[self._made % len(kinds)] for _ in sequences]


def no_drafter(*arguments: Any) -> str:
    return "none"


def deployed(target: Path, drafter: str) -> Engine:
    return drafting(native_config(target), method="custom", drafter=drafter, num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("nowhere:Drafter", "there is no nowhere:Drafter: No module named 'nowhere'"),
        (f"{HERE}:Missing", "there is no .*: module .* has no attribute 'Missing'"),
        ("examples.custom drafter:X", "there is no examples.custom drafter:X"),
        (f"{HERE}:HERE", "is neither a class nor a function"),
        (f"{HERE}:no_drafter", "makes a str, not a speculation.drafter.Drafter"),
    ],
)
def test_objects_that_are_no_drafters_are_refused(target: Path, drafter: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--speculative-config: drafter: .*{why}"):
        deployed(target, drafter)


def test_invalid_drafts_are_dropped(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = [ask(f"r{i}", prompt_of(20, i), 24, ignore_eos=True) for i in range(2)]
    plain = tokens(run(Engine(native_config(target)), requests))
    engine = deployed(target, f"{HERE}:WrongDrafter")
    assert tokens(run(engine, requests)) == plain
    assert engine._speculator is not None
    assert engine._speculator.counters()["spec_decode_refused_drafts_total"] > 10
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in lines if "are dropped" in line] == lines[:1]


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (Draft([1, 2]), ""),
        (Draft([1, 2, 3], parents=[-1, -1, 0]), ""),
        (Draft([1, 2], probes=[0b11, 0b101]), ""),
        (Draft([1, 2, 3, 4]), "it has 4 tokens, where 1 to 3 were asked for"),
        (Draft([]), "it has 0 tokens, where 1 to 3 were asked for"),
        (Draft([9, 10]), "the token 10 is not among the model's 10"),
        (Draft([1, 2], parents=[-1]), "it has 2 nodes and 1 parents"),
        (Draft([1, 2], parents=[-1, 1]), "a node does not come after its parent"),
        (Draft([1], parents=[-2]), "a node does not come after its parent"),
    ],
)
def test_the_fault_of_a_draft_is_reported(draft: Draft, why: str) -> None:
    assert problem(draft, 3, 10) == why
