"""How many drafted tokens are verified must not depend on those tokens.

With a target of (0.70, 0.30) and a draft of (0.50, 0.50), whoever verifies the first token when it is drafted
and draws afresh when the second one is, puts out (0.85, 0.15), though each step on its own is sound.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.sequence import Sequence
from engine.speculator import Draft
from protocol.speculation import Verification
from tests.statistics.toy_speculation import Propose, chi_squared, generate, sampled_chain

MODEL = torch.tensor([[0.70, 0.30], [0.70, 0.30]])
DRAFT = torch.full((2, 2), 0.5)
LONGEST = 3
TRIALS = 20_000

Choose = Callable[[list[int]], int]
"""From tokens to how many drafted ones to verify."""


def by_length(tokens: list[int]) -> int:
    return len(tokens) % (LONGEST + 1)


def by_last_token(tokens: list[int]) -> int:
    return LONGEST if tokens[-1] == 0 else 1


def while_it_drafts_the_first(tokens: list[int]) -> int:
    return int(tokens[-1] == 0)


def verified_as(choose: Choose, verification: Verification, *, peeks: bool = False) -> Propose:
    """Drafts cut to the length that `choose` says from the committed tokens; peeking, from drafted ones."""
    draw = sampled_chain(DRAFT, LONGEST, verification)

    def propose(sequences: list[Sequence]) -> None:
        draw(sequences)
        for sequence in sequences:
            draft = sequence.draft
            assert draft is not None
            count = choose(draft.token_ids[:1] if peeks else sequence.token_ids)
            distributions = draft.distributions[:count] if draft.distributions is not None else None
            sequence.draft = Draft(draft.token_ids[:count], distributions=distributions) if count else None

    return propose


@pytest.mark.parametrize("choose", [by_length, by_last_token, while_it_drafts_the_first])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_a_policy_that_sees_committed_tokens_alone_is_sound(
    choose: Choose, verification: Verification
) -> None:
    found = generate(MODEL, verified_as(choose, verification), verification, TRIALS)
    assert chi_squared(found.tokens, MODEL)[1] > 1e-4


def test_a_policy_that_peeks_is_caught() -> None:
    propose = verified_as(while_it_drafts_the_first, "standard", peeks=True)
    found = generate(MODEL, propose, "standard", TRIALS, num_tokens=1)
    assert (found.tokens == 0).mean() == pytest.approx(0.85, abs=0.01)
    assert chi_squared(found.tokens, MODEL)[1] < 1e-10


def test_peeking_does_coupled_verification_no_harm() -> None:
    propose = verified_as(while_it_drafts_the_first, "coupled", peeks=True)
    found = generate(MODEL, propose, "coupled", TRIALS)
    assert chi_squared(found.tokens, MODEL)[1] > 1e-4
