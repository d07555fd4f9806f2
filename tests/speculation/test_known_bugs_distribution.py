"""Faults of other servers that change the distribution of tokens. Numbers follow our reference list.

Number 5, a token after a rejection from another row: tests/speculation/test_verification.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Verification
from tests.engine.sampler_reference import distribution
from tests.speculation import scripted
from tests.speculation.scripted import ScriptedDrafter
from tests.speculation.small_engine import VOCAB_SIZE, ask, native_config, prompt_of, run, tokens
from tests.statistics.toy_speculation import LogitsRunner

BY_CHANCE: list[Verification] = ["standard", "block"]

PROCESSING: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "penalized": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_k": 7},
}


def sequence_of(seed: int, output: list[int], **sampling: Any) -> SequenceState:
    params = SamplingParams(max_tokens=100, seed=seed, **sampling)
    request = EngineRequest(
        request_id=f"r{seed}", prompt_token_ids=[3, 1, 4], sampling=params, output_token_ids=output
    )
    return SequenceState(request, seed)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in PROCESSING), ("penalized", torch.bfloat16)]
)
def test_bugs_01_and_03_drafts_come_with_the_distribution_they_were_drawn_from(
    name: str, dtype: torch.dtype
) -> None:
    """The distribution includes all processing, and comes from the same logits as the ratio, in any dtype."""
    size, count = 20, 1_500
    sequences = [sequence_of(seed, [2, 2, 7], **PROCESSING[name]) for seed in range(count)]
    logits = 2 * torch.randn(2, 1, size, generator=torch.Generator().manual_seed(5)).to(dtype)
    steps = iter(logits)
    runner = LogitsRunner(size, lambda last: next(steps).expand(len(last), -1))
    drawn = runner.draft(sequences, 2, "standard")
    for depth in range(2):
        for sequence, draft in zip(sequences[:20], drawn, strict=False):
            assert draft.distributions is not None and draft.distributions.dtype is torch.float32
            row = sequence.sampling_row(draft.token_ids[:depth])
            exact = distribution(logits[depth, 0], row)
            torch.testing.assert_close(draft.distributions[depth].double(), exact, atol=1e-6, rtol=1e-5)
        counts = torch.bincount(torch.tensor([draft.token_ids[0] for draft in drawn]), minlength=size)
        assert drawn[0].distributions is not None
        frequencies = counts / count
        assert (frequencies - drawn[0].distributions[0]).abs().max() < 0.06
        assert counts[drawn[0].distributions[0] == 0].sum() == 0


def test_bug_04_greedy_drafts_have_no_distribution() -> None:
    runner = LogitsRunner(20, lambda last: torch.randn(len(last), 20))
    drafts = runner.draft([sequence_of(0, []), sequence_of(1, [], temperature=0.0)], 1, "standard")
    assert [draft.distributions is not None for draft in drafts] == [True, False]


def unrelated_drafts(sequence: SequenceState, count: int) -> Draft:
    """Draft tokens that depend on the sequence's own tokens alone."""
    return Draft([(7 * token + 1) % VOCAB_SIZE for token in sequence.token_ids[-count:]])


def crowd() -> list[EngineRequest]:
    """Return greedy and sampled requests with several parameters, some with a common seed."""
    return [
        ask(f"r{index}", prompt_of(15 + index, index), ignore_eos=True, **sampling)
        for index, sampling in enumerate(
            [
                {"temperature": 0.0},
                {"temperature": 1.0, "seed": 1},
                {"temperature": 1.0, "seed": 1, "top_k": 20},
                {"temperature": 0.0, "presence_penalty": 1.0},
                {"temperature": 0.7, "seed": 2**40, "top_p": 0.9},
                {"temperature": 1.2, "seed": -5, "min_p": 0.01, "logprobs": 1},
            ]
        )
    ]


@pytest.mark.parametrize("verification", ["coupled", *BY_CHANCE])
def test_bugs_06_and_07_a_request_is_the_same_alone_and_in_any_batch(
    pair: tuple[Path, Path], verification: Verification
) -> None:
    def engine() -> Engine:
        drafter = ScriptedDrafter(unrelated_drafts)
        return scripted.engine_with(native_config(pair[0]), drafter, num_tokens=3, verification=verification)

    together = tokens(run(engine(), crowd()))
    backwards = tokens(run(engine(), crowd()[::-1]))
    alone: dict[str, list[int]] = {}
    one_by_one = engine()
    for request in crowd():
        alone |= tokens(run(one_by_one, [request]))
    assert together == backwards == alone


@pytest.mark.parametrize("verification", ["coupled", *BY_CHANCE])
def test_bug_06_requests_that_differ_only_in_their_seeds_differ(
    pair: tuple[Path, Path], verification: Verification
) -> None:
    prompt = prompt_of(20)
    asked = [
        ask(f"r{index}", prompt, ignore_eos=True, temperature=1.5, seed=seed)
        for index, seed in enumerate([1, 2, 3, 1, 1 + 2**32])
    ]
    drafter = ScriptedDrafter(unrelated_drafts)
    engine = scripted.engine_with(native_config(pair[0]), drafter, num_tokens=3, verification=verification)
    found = tokens(run(engine, asked))
    assert found["r0"] == found["r3"]
    assert len({tuple(each) for each in found.values()}) == 4
