"""Ranking tokens by the target's later choice agrees with the sampler that makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.copies import upload_to
from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow
from protocol.sampling import SamplingParams
from speculation.drawing import rank

VOCAB_SIZE = 500
CPU = torch.device("cpu")


def logits_of(num_rows: int, sharpness: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * sharpness


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 0.9},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1e-9},
    ],
    ids=str,
)
def test_the_first_token_is_the_samplers_choice(sampling: dict[str, Any]) -> None:
    logits = logits_of(40)
    params = [SamplingParams(max_tokens=1, seed=seed, **sampling) for seed in range(40)]
    rows = [SamplingRow(p, [], [], 100 + i, str(i)) for i, p in enumerate(params)]
    taken = Sampler(VOCAB_SIZE, CPU, []).sample(logits, rows).token_ids
    scores, token_ids = rank(logits, params, [row.position for row in rows], upload_to(CPU), with_noise=True)
    first = token_ids.gather(1, scores.argmax(1, keepdim=True))[:, 0].tolist()
    assert sum(a == b for a, b in zip(first, taken, strict=True)) >= 39  # one may come from far below
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(40))


def test_without_noise_sampled_rows_have_their_own_probabilities() -> None:
    """Greedy rows are surer: the target takes the likeliest token without a draw."""
    logits = logits_of(2)
    params = [SamplingParams(max_tokens=1, temperature=t, seed=1) for t in (0.0, 2.0)]
    scores, token_ids = rank(logits, params, [5, 5], upload_to(CPU), with_noise=False)
    for row, p in enumerate(params):
        assert token_ids[row].tolist() == logits[row].topk(64).indices.tolist(), p
    expected = (logits[1] / 2.0)[token_ids[1]].log_softmax(0)
    torch.testing.assert_close(scores[1], expected)
    assert scores[0, 0] > logits[0].log_softmax(0).max()


def test_a_row_does_not_depend_on_others() -> None:
    logits = logits_of(3)
    params = [SamplingParams(max_tokens=1, temperature=t, seed=3, top_k=9) for t in (0.0, 0.7, 1.0)]
    together, _ = rank(logits, params, [7, 8, 9], upload_to(CPU), with_noise=True)
    for row in range(3):
        alone, _ = rank(
            logits[row : row + 1], params[row : row + 1], [7 + row], upload_to(CPU), with_noise=True
        )
        torch.testing.assert_close(together[row : row + 1], alone)
    assert together[0].isfinite().all() and together[1].isfinite().sum() == 9
