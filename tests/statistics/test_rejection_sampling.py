"""Rejection sampling gives tokens of the target's distribution, whatever was drafted and how.

Seeds are fixed, so a test that passes once always passes. Sound code fails one with probability ALPHA.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.sampler import Purpose, draw, native, round_keys, sampler, torch_sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification import native as native_rules
from speculation.verification import rejection
from speculation.verification.rejection import noise_keys
from tests.statistics.toy_speculation import (
    ALPHA,
    NUM_TRIALS,
    VOCAB_SIZE,
    Propose,
    assert_fits,
    chi_squared,
    generate,
    likeliest_chain,
    likeliest_tree,
    sampled_chain,
    sampled_siblings,
    table,
)

MODEL, DRAFT = table(0), table(1)
BY_CHANCE: list[Verification] = ["standard", "block"]
ALL: list[Verification] = ["coupled", "standard", "block"]
FEWER_TRIALS = 20_000
FEW_TRIALS = 5_000
"""Enough trials for the first token alone."""


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select compiled calls or torch for drawing drafts and for the standard rule."""
    name: str = request.param
    if name == "torch":
        monkeypatch.setattr(sampler, "compiled", lambda: None)
    elif native.compiled() is None or native_rules.compiled() is None:
        pytest.skip("needs a C++ compiler")
    return name


both_paths = pytest.mark.usefixtures("path")
rules_on_their_paths = pytest.mark.parametrize(
    ("path", "verification"),
    [("compiled", "standard"), ("torch", "standard"), ("torch", "block")],
    indirect=["path"],
)
"""Both paths for the standard rule. Block verification always uses torch."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "verification"), [("compiled", "standard"), ("torch", "block")], indirect=["path"]
)
def test_chain_of_sampled_tokens(path: str, verification: Verification) -> None:
    """Runs the compiled rule with all trials; the others have fewer."""
    count = NUM_TRIALS if path == "compiled" else FEWER_TRIALS
    found = generate(MODEL, sampled_chain(DRAFT, 2, verification), verification, count)
    assert_fits(found.tokens, MODEL)
    assert 0.2 < found.acceptance < 0.8


@rules_on_their_paths
def test_chain_of_likeliest_tokens(path: str, verification: Verification) -> None:
    assert_fits(generate(MODEL, likeliest_chain(DRAFT, 2), verification, FEWER_TRIALS).tokens, MODEL)


@pytest.mark.parametrize("propose", [likeliest_tree(DRAFT, [2, 2]), sampled_siblings(DRAFT)])
def test_trees_and_siblings(propose: Propose) -> None:
    assert_fits(generate(MODEL, propose, "standard", FEWER_TRIALS).tokens, MODEL)


@pytest.mark.parametrize(
    ("path", "verification"),
    [("compiled", "coupled"), ("compiled", "standard"), ("torch", "block")],
    indirect=["path"],
)
def test_longer_drafts_and_several_rounds(path: str, verification: Verification) -> None:
    propose = sampled_chain(DRAFT, 4, verification)
    assert_fits(generate(MODEL, propose, verification, FEWER_TRIALS).tokens, MODEL)


@pytest.mark.parametrize(
    ("path", "verification", "sampled"),
    [
        ("compiled", "coupled", True),
        ("compiled", "standard", True),
        ("torch", "standard", False),
        ("torch", "block", True),
        ("torch", "block", False),
    ],
    indirect=["path"],
)
def test_a_draft_of_impossible_tokens(path: str, verification: Verification, sampled: bool) -> None:
    """The draft proposes only tokens with probability 0."""
    half = VOCAB_SIZE // 2
    model, draft = MODEL.clone(), DRAFT.clone()
    model[:, half:] = 0.0
    draft[:, :half] = 0.0
    model, draft = (t / t.sum(dim=1, keepdim=True) for t in (model, draft))
    propose = sampled_chain(draft, 2, verification) if sampled else likeliest_chain(draft, 2)
    found = generate(model, propose, verification, FEWER_TRIALS // 2)  # half as many outcomes
    assert found.accepted == 0
    assert_fits(found.tokens, model)


@both_paths
@pytest.mark.parametrize("verification", ALL)
def test_a_draft_that_is_the_model_is_always_accepted(verification: Verification) -> None:
    found = generate(MODEL, sampled_chain(MODEL, 3, verification), verification, count=5_000)
    assert found.acceptance == 1.0


def test_block_verification_accepts_at_least_as_much_as_the_standard_rule() -> None:
    accepted = {
        rule: generate(MODEL, sampled_chain(DRAFT, 4, rule), rule, FEW_TRIALS, num_tokens=1).acceptance
        for rule in BY_CHANCE
    }
    assert accepted["block"] > accepted["standard"]


# --- lengths that depend on drafted tokens -----------------------------------------------------------


def cut(draw: Propose, length: Callable[[list[int], list[int]], int]) -> Propose:
    """Verify as many of each draft's tokens as `length` says of committed and drafted ones."""

    def propose(sequences: list[SequenceState]) -> None:
        draw(sequences)
        for sequence in sequences:
            draft = sequence.draft
            assert draft is not None
            count, drawn = length(sequence.token_ids, draft.token_ids), draft.distributions
            rest = Draft(draft.token_ids[:count], distributions=None if drawn is None else drawn[:count])
            sequence.draft = rest if count else None

    return propose


@pytest.mark.parametrize("verification", ALL)
def test_only_coupled_verification_allows_lengths_that_depend_on_drafted_tokens(
    verification: Verification,
) -> None:
    """Here token 0 is verified whenever it is drafted, and token 1 never."""
    model, is_sound = torch.tensor([[0.7, 0.3], [0.7, 0.3]]), verification == "coupled"
    draw_evenly = sampled_chain(torch.full((2, 2), 0.5), 1, verification)
    propose = cut(draw_evenly, lambda committed, drafted: int(drafted[0] == 0))
    found = generate(model, propose, verification, FEWER_TRIALS, num_tokens=1)
    assert (chi_squared(found.tokens, model)[1] > ALPHA) == is_sound
    assert (found.tokens == 0).mean() == pytest.approx(0.7 if is_sound else 0.85, abs=0.015)


@pytest.mark.parametrize("verification", BY_CHANCE)
def test_lengths_may_depend_on_committed_tokens(verification: Verification) -> None:
    draw_three = sampled_chain(DRAFT, 3, verification)
    propose = cut(draw_three, lambda committed, drafted: (committed[-1] + len(committed)) % 4)
    assert_fits(generate(MODEL, propose, verification, FEWER_TRIALS).tokens, MODEL)


# --- power of these tests: known faults are caught -------------------------------------------------


@both_paths
@pytest.mark.parametrize("kept", [1, 3])
def test_bugs_01_and_04_a_draft_drawn_from_another_distribution_is_caught(kept: int) -> None:
    """The draft is the likeliest token, or drawn from the likeliest ones; the ratios use all."""
    likely = DRAFT * (DRAFT.topk(kept).values[:, -1:] <= DRAFT)
    draw_likely = sampled_chain(likely / likely.sum(dim=1, keepdim=True), 2, "standard")

    def propose(sequences: list[SequenceState]) -> None:
        draw_likely(sequences)
        for sequence in sequences:
            assert sequence.draft is not None
            contexts = [sequence.token_ids[-1], *sequence.draft.token_ids[:-1]]
            sequence.draft.distributions = DRAFT[contexts]

    found = generate(MODEL, propose, "standard", FEW_TRIALS, num_tokens=1)
    assert chi_squared(found.tokens, MODEL)[1] < ALPHA


def narrow() -> tuple[Tensor, Tensor]:
    """Return a target over four tokens, among which shared noise shows, and a draft of reverse ranks."""
    model = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(4, -1).clone()
    return model, model.flip(1)


def drawn_with(purpose: Purpose, draft: Tensor) -> Propose:
    """Draw tokens with the noise of this purpose."""

    def propose(sequences: list[SequenceState]) -> None:
        weights = draft[[sequence.token_ids[-1] for sequence in sequences]]
        positions = [sequence.position for sequence in sequences]
        tokens = draw(weights, noise_keys(sequences, positions, purpose, weights.device)).tolist()
        for sequence, token, row in zip(sequences, tokens, weights, strict=True):
            sequence.draft = Draft([token], distributions=row.unsqueeze(0))

    return propose


@both_paths
def test_bug_02_noise_that_drafts_share_with_their_verification_is_caught() -> None:
    """Uses the standard rule, which equals block verification for one token."""
    model, draft = narrow()

    def deviation(purpose: Purpose) -> float:
        found = generate(model, drawn_with(purpose, draft), "standard", FEWER_TRIALS, 1)
        return chi_squared(found.tokens, model)[0]

    assert deviation(Purpose.DRAFT) < 25
    assert deviation(Purpose.ACCEPTANCE) > 100
    assert deviation(Purpose.RECOVERY) > 100


def test_noise_that_two_rounds_share_is_caught_in_block_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block reveals the noise of the tokens that it rejects, which the next round must not use again."""
    monkeypatch.setattr(sampler, "compiled", lambda: None)

    def stale_round(seeds: Tensor, starts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        return round_keys(seeds, torch.zeros_like(starts), positions, purpose)

    def stale(sequences, positions, purpose, device) -> Tensor:
        seeds = torch.tensor([sequence.params.seed for sequence in sequences])
        return stale_round(seeds, seeds, torch.tensor(positions), purpose)

    model, draft = narrow()
    propose = sampled_chain(draft, 3, "block")
    assert_fits(generate(model, propose, "block", FEWER_TRIALS).tokens, model)
    with (
        mock.patch.object(rejection, "noise_keys", stale),
        mock.patch.object(torch_sampler, "round_keys", stale_round),
    ):
        found = generate(model, propose, "block", FEWER_TRIALS)
    assert chi_squared(found.tokens, model)[1] < ALPHA
