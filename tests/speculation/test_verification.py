"""Verdicts on single drafts by every rule. Long-run distributions: tests/statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification.verify import verify
from tests.speculation.verdicts import BY_CHANCE, RULES, VOCAB, Batch, sequence_with, told

VOCAB_SIZE = 12
TREE = Draft([5, 6, 7, 8, 9, 10], [-1, -1, 1, 1, 3, 0])
"""5 and 6 follow the last token; 7 and 8 follow 6, 9 follows 8, and 10 follows 5."""


def certain(*tokens: int) -> Tensor:
    """Return logits of rows that make these tokens certain."""
    logits = torch.full((len(tokens), VOCAB_SIZE), -1e4)
    logits[torch.arange(len(tokens)), list(tokens)] = 1e4
    return logits


def judge(rule: Verification, logits: Tensor, *sequences: SequenceState) -> list[Verdict]:
    return verify(rule, list(sequences), logits, Sampler(VOCAB_SIZE, "cpu", [0]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_is_accepted_up_to_the_first_difference(rule: Verification, temperature: float) -> None:
    sequence = sequence_with(Draft([5, 6, 7]), temperature=temperature)
    for last in (5, 6, 7):
        model = [5 if last > 5 else 11, 6 if last > 6 else 11, 11, 4]
        (verdict,) = judge(rule, certain(*model), sequence)
        assert verdict.accepted == list(range(last - 5))
        assert verdict.token_ids == [*range(5, last), 11]
    (verdict,) = judge(rule, certain(5, 6, 7, 4), sequence)
    assert (verdict.accepted, verdict.token_ids) == ([0, 1, 2], [5, 6, 7, 4])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_models_path_through_a_tree_is_accepted(rule: Verification, temperature: float) -> None:
    sequence = sequence_with(TREE, temperature=temperature)
    (verdict,) = judge(rule, certain(6, 11, 8, 11, 9, 4, 11), sequence)
    assert (verdict.accepted, verdict.token_ids) == ([1, 3, 4], [6, 8, 9, 4])
    (verdict,) = judge(rule, certain(6, 11, 3, 11, 9, 4, 11), sequence)
    assert (verdict.accepted, verdict.token_ids) == ([1], [6, 3])
    (verdict,) = judge(rule, certain(6, 11, 10, 11, 9, 4, 11), sequence)  # 10 follows 5 alone
    assert (verdict.accepted, verdict.token_ids) == ([1], [6, 10])
    (verdict,) = judge(rule, certain(4, 10, 8, 11, 9, 4, 11), sequence)
    assert (verdict.accepted, verdict.token_ids) == ([], [4])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probes_get_the_likeliest_token_and_are_never_accepted(
    rule: Verification, temperature: float
) -> None:
    """Even if the request bans that token or samples with much noise."""
    draft = Draft([5, 6, 6, 6], probes=[0b1001, 0b11001])
    sequence = sequence_with(draft, temperature=temperature and 50.0, banned_token_sequences=[[9]])
    logits = certain(5, 6, 7, 8, 9)
    (verdict,) = judge(rule, logits, sequence)
    assert verdict.probed == [8, 9]
    assert set(verdict.accepted) <= {0, 1}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_score_fails_requests_that_reach_it(
    rule: Verification, temperature: float
) -> None:
    logits = certain(5, 6, 7)
    logits[1] = torch.nan
    there = sequence_with(Draft([5, 6]), temperature=temperature)
    not_there = sequence_with(Draft([4, 6]), temperature=temperature)
    verdicts = judge(rule, torch.cat([logits, logits]), there, not_there)
    assert [verdict.failed for verdict in verdicts] == [True, False]
    assert verdicts[1].token_ids == [5]


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_impossible_distributions_do_no_worse_than_wrong_drafts(rule: Verification) -> None:
    for distributions in (torch.zeros(2, VOCAB_SIZE), torch.ones(2, VOCAB_SIZE)):
        sequence = sequence_with(Draft([5, 6], distributions=distributions))
        (verdict,) = judge(rule, torch.randn(3, VOCAB_SIZE), sequence)
        assert len(verdict.token_ids) == len(verdict.accepted) + 1 and not verdict.failed


@pytest.mark.parametrize("rule", RULES)
def test_log_probabilities_come_from_the_rows_on_the_path(rule: Verification) -> None:
    logits = certain(6, 11, 8, 11, 9, 4, 11) / 1e3 + torch.randn(7, VOCAB_SIZE)
    sequence = sequence_with(TREE, logprobs=2, top_k=1)
    (verdict,) = judge(rule, logits, sequence)
    expected = logits.log_softmax(dim=1)
    for row, token, entry in zip([0, 2, 4, 5], verdict.token_ids, verdict.logprobs, strict=True):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert entry.top_token_ids[0] == token and len(entry.top_token_ids) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_mixed_batch_gets_the_verdicts_of_lone_requests(rule: Verification) -> None:
    """A request without a draft gets the token of a server without speculation."""
    batch = Batch.of_each_kind(0)
    sampler = Sampler(VOCAB, "cpu", [0])
    together = told(verify(rule, batch.sequences, batch.logits, sampler))
    for sequence, rows, verdict in zip(batch.sequences, batch.rows, together, strict=True):
        assert told(verify(rule, [sequence], rows, sampler)) == [verdict]
        if sequence.draft is None:
            assert told(verify("coupled", [sequence], rows, sampler)) == [verdict]
