"""Chains verified in one compiled call get the same verdicts as by torch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sampler import Sampler, TorchSampler
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification import native
from speculation.verification.verify import verify
from tests.speculation.verdicts import Batch, sequence_with, told

pytestmark = pytest.mark.skipif(native.compiled() is None, reason="needs a C++ compiler")

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 1.4},
    {"top_k": 9, "top_p": 0.9, "temperature": 1.7},
]


def crowd(count: int, vocab_size: int, dtype: torch.dtype) -> tuple[list[SequenceState], Tensor]:
    """Return sequences with all parameters and all kinds of drafts that resemble the model, and logits."""
    batch = Batch(vocab_size, vocab_size, dtype)
    sampler = Sampler(vocab_size, "cpu", [])
    for number in range(count):
        length = batch.random.randrange(6)
        batch.add(PARAMS[number % len(PARAMS)], length, drawn=0.5 * (number % 3 > 0))
        sequence = batch.sequences[-1]
        if sequence.draft is not None and sequence.draft.distributions is None:
            chosen = sampler.choose(batch.rows[-1], sequence.step_rows())[0].tolist()
            foreseen = batch.random.randrange(length + 1)
            sequence.draft.token_ids[:foreseen] = chosen[:foreseen]
    return batch.sequences, batch.logits


def judge(
    sequences: list[SequenceState], logits: Tensor, rule: Verification = "standard", *, natively: bool = True
) -> list[Verdict]:
    sampler = Sampler(logits.shape[1], "cpu", [], row_sampler=None if natively else TorchSampler())
    return verify(rule, sequences, logits, sampler)


@pytest.mark.parametrize("rule", ["coupled", "standard"])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (2, torch.float32),
        (15, torch.bfloat16),
        (128, torch.float16),
        (1000, torch.float32),
        (4099, torch.bfloat16),
    ],
)
def test_verdicts_equal_torchs(vocab_size: int, dtype: torch.dtype, rule: Verification) -> None:
    """Except where a single bit decides."""
    sequences, logits = crowd(300, vocab_size, dtype)
    found, expected = (told(judge(sequences, logits, rule, natively=each)) for each in (True, False))
    unlike = [number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    assert len(unlike) <= 1
    rejected = [len(v[1]) < s.draft.num_nodes for v, s in zip(found, sequences, strict=True) if s.draft]
    assert 20 < sum(rejected) < len(rejected) - 20


def test_the_number_of_threads_changes_nothing() -> None:
    sequences, logits = crowd(100, 30_000, torch.bfloat16)
    num_threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(told(judge(sequences, logits)))
    finally:
        torch.set_num_threads(num_threads)
    assert found[0] == found[1]


def test_tensors_need_not_be_contiguous() -> None:
    sequences, logits = crowd(60, 200, torch.float32)
    expected = told(judge(sequences, logits))
    wider = torch.cat([logits, torch.full_like(logits, 50.0)], dim=1)[:, :200]
    for sequence in sequences:
        if sequence.draft is not None and sequence.draft.distributions is not None:
            sequence.draft.distributions = sequence.draft.distributions.T.contiguous().T
    assert told(judge(sequences, wider)) == expected
    assert told(judge(sequences, logits.T.contiguous().T)) == expected


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_rows_after_the_first_rejection_are_not_read(rule: Verification) -> None:
    logits = torch.full((4, 20), -1e4)
    logits[:, 5] = 1e4
    logits[2:] = torch.nan
    (verdict,) = judge([sequence_with(Draft([5, 6, 5]))], logits, rule)
    assert (verdict.token_ids, verdict.accepted, verdict.failed) == ([5, 5], [0], False)
    (verdict,) = judge([sequence_with(Draft([5, 5, 5]))], logits, rule)
    assert (verdict.accepted, verdict.failed) == ([0, 1], True)


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_other_sequences_get_the_same_verdict_in_a_mixed_batch(rule: Verification) -> None:
    """Trees, probes, edited logits and log-probabilities are left to torch's operators."""
    others = [
        sequence_with(Draft([1, 2, 3], [-1, -1, 0]), 0),
        sequence_with(Draft([1, 2, 3], probes=[0b1011]), 1),
        sequence_with(Draft([1, 2]), 2, logit_bias={3: 2.0}),
        sequence_with(Draft([1, 2]), 3, logprobs=1),
        sequence_with(Draft([1, 2]), 4, repetition_penalty=1.5),
    ]
    assert not any(map(native.can_verify, others))
    plain = [sequence_with(Draft([1, 2]), 5), sequence_with(None, 6)]
    assert all(map(native.can_verify, plain))
    sequences = [*others[:3], *plain, *others[3:]]
    logits = torch.randn(21, 30, generator=torch.Generator().manual_seed(0))
    together = told(judge(sequences, logits, rule))
    assert together == told(judge(sequences, logits, rule, natively=False))
    row = 0
    for sequence, verdict in zip(sequences, together, strict=True):
        first, row = row, row + 1 + (len(sequence.draft.token_ids) if sequence.draft else 0)
        assert told(judge([sequence], logits[first:row], rule)) == [verdict]
    assert row == 21


@pytest.mark.parametrize("shape", [(2, 8), (1, 9), (3, 9)])
def test_distributions_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    draft = Draft([1, 2], distributions=torch.full(shape, 0.1))
    with pytest.raises(ValueError, match="distribution"):
        judge([sequence_with(draft)], torch.randn(3, 9))


def test_missing_rows_are_not_read() -> None:
    with pytest.raises(ValueError, match="rows of logits"):
        judge([sequence_with(Draft([1, 2]))], torch.randn(2, 9))
