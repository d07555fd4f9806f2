"""Faults of other servers with penalties, bans and log-probabilities of drafted tokens.

Numbers follow our reference list; 13 and 14 concern grammars, which other tests cover.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.speculation import Verification
from tests.speculation import scripted
from tests.speculation.scripted import ScriptedDrafter
from tests.speculation.small_engine import (
    VOCAB_SIZE,
    ask,
    drafted_and_accepted,
    drafting,
    native_config,
    prompt_of,
    run,
    tokens,
)

NUM_DRAFTED = 5

CONSTRAINTS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.1},
    "rewarded repetition": {"frequency_penalty": -1.0},
    "allowed": {"allowed_token_ids": [5, 9, 20, 77, 130, 131, 200]},
    "banned": {"banned_token_sequences": [[9], [130, 131], [20, 77, 5], [131, 131]]},
    "few allowed, banned and penalized": {
        "allowed_token_ids": [5, 9, 20],
        "banned_token_sequences": [[5, 5], [9, 20, 9]],
        "frequency_penalty": 0.8,
    },
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [5, 9], "allowed_token_ids": [5, 9, 20, 77]},
    "bias": {"logit_bias": {5: 6.0, 9: 5.0, 20: -4.0}, "presence_penalty": 2.0},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
}


def requests(**sampling: Any) -> list[EngineRequest]:
    """Return requests with all constraints, so that rows with and without each lie side by side."""
    return [
        ask(name, prompt_of(12 + 3 * index, index), ignore_eos=True, **(sampling | constraint))
        for index, (name, constraint) in enumerate(CONSTRAINTS.items())
    ]


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, dict[str, TokenOutput]]:
    engine = Engine(native_config(pair[0]))
    return {name: run(engine, requests(**sampling)) for name, sampling in SAMPLING.items()}


def repeats(sequence: SequenceState, count: int) -> Draft:
    return Draft([sequence.token_ids[-1]] * count)


WITHOUT_CHOICE = {"temperature": 1.0, "top_k": 1}
"""Makes requests take the path of sampling, with the tokens of greedy ones."""
RULES: list[tuple[Verification, str, dict[str, Any]]] = [
    *(("coupled", name, sampling) for name, sampling in SAMPLING.items()),
    *((rule, "greedy", WITHOUT_CHOICE) for rule in ("standard", "block")),
]


@pytest.mark.parametrize(("verification", "expected", "sampling"), RULES)
def test_bug_15_each_position_is_constrained_by_the_tokens_before_it(
    pair: tuple[Path, Path],
    plain: dict[str, dict[str, TokenOutput]],
    verification: Verification,
    expected: str,
    sampling: dict[str, Any],
) -> None:
    """Also behind drafts that repeat one token."""
    often_right = scripted.sometimes_right(tokens(plain[expected]), 0.7, VOCAB_SIZE)
    for script in (often_right, repeats):
        drafter = ScriptedDrafter(script)
        engine = scripted.engine_with(native_config(pair[0]), drafter, NUM_DRAFTED, verification=verification)
        found = run(engine, requests(**sampling))
        assert tokens(found) == tokens(plain[expected])
        assert drafted_and_accepted(found)[1] > 20 or script is repeats


@pytest.mark.parametrize("verification", ["coupled", "standard", "block"])
def test_bug_15_a_draft_model_keeps_no_penalties_of_rejected_tokens(
    pair: tuple[Path, Path], plain: dict[str, dict[str, TokenOutput]], verification: Verification
) -> None:
    target, draft = pair
    options = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTED}
    engine = drafting(native_config(target, 256), verification=verification, **options)
    assert tokens(run(engine, requests(temperature=0.0))) == tokens(plain["greedy"])


@pytest.mark.parametrize(("verification", "_", "sampling"), RULES)
def test_bug_16_log_probabilities_equal_those_without_speculation(
    pair: tuple[Path, Path], verification: Verification, _: str, sampling: dict[str, Any]
) -> None:
    asked = [
        ask(f"r{top}", prompt_of(20, top), ignore_eos=True, logprobs=top, **sampling)
        for top in (0, 1, 5, None)
    ]
    expected = run(Engine(native_config(pair[0])), asked)
    script = scripted.sometimes_right(tokens(expected), 0.6, VOCAB_SIZE)
    engine = scripted.engine_with(
        native_config(pair[0]), ScriptedDrafter(script), NUM_DRAFTED, verification=verification
    )
    assert_same_logprobs(run(engine, asked), expected)


def assert_same_logprobs(found: dict[str, TokenOutput], expected: dict[str, TokenOutput]) -> None:
    assert tokens(found) == tokens(expected)
    for request_id, output in expected.items():
        got = found[request_id].logprobs
        if output.logprobs is None:
            assert got is None
            continue
        assert got is not None and len(got) == len(output.logprobs) == len(output.token_ids)
        for entry, other in zip(got, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert entry.rank == other.rank and entry.top_token_ids == other.top_token_ids
            assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
