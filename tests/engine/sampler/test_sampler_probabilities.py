"""The distributions of tokens, drawing from them, and the noise of speculative rounds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampler import Purpose, Sampler, draw, gumbel_noise, round_keys, stream_keys, uniform_noise
from tests.engine.sampler.test_sampler import EOS, PARAMS, crowd
from tests.engine.sampler_reference import distribution, make_row

VOCAB_SIZE = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_a_mixed_batch_has_the_defined_distributions(spread, dtype):
    torch.manual_seed(0)
    rows = crowd(VOCAB_SIZE, random.Random(1))
    logits = (spread * torch.randn(len(rows), VOCAB_SIZE)).to(dtype)
    found = Sampler(VOCAB_SIZE, "cpu", EOS).probabilities(logits, rows)
    assert found.dtype is torch.float32
    for name, row, row_logits, probabilities in zip(PARAMS, rows, logits, found, strict=True):
        exact = distribution(row_logits, row, EOS)
        torch.testing.assert_close(probabilities.double(), exact, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", PARAMS)
def test_drawing_from_them_is_sampling(name):
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(f"r{seed}", seed=seed, **PARAMS[name]) for seed in range(200)]
    logits = 2.0 * torch.randn(len(rows), VOCAB_SIZE, generator=generator)
    sampler = Sampler(VOCAB_SIZE, "cpu", EOS)
    keys = stream_keys(torch.arange(200), torch.full((200,), rows[0].position))
    assert draw(sampler.probabilities(logits, rows), keys).tolist() == sampler.sample(logits, rows).token_ids


def test_greedy_rows_have_a_single_token_the_lowest_among_equals():
    rows = [make_row("a", temperature=0.0), make_row("b")]
    found = Sampler(8, "cpu", EOS).probabilities(torch.ones(2, 8), rows)
    assert found[0].tolist() == [1.0] + 7 * [0.0]
    assert found[1].tolist() == 8 * [0.125]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}])
def test_rows_that_fail_have_no_distribution(params):
    logits = torch.randn(3, 8)
    logits[1] = torch.nan
    rows = [make_row("a", **params), make_row("b", **params), make_row("c")]
    found = Sampler(8, "cpu", EOS).probabilities(logits, rows)
    assert found.sum(dim=1).tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_drawing_takes_weights_of_any_sum():
    weights = torch.rand(64, 5000, generator=torch.Generator().manual_seed(0))
    weights[weights < 0.5] = 0.0
    keys = stream_keys(torch.arange(64), torch.arange(64))
    chosen = draw(weights, keys)
    assert torch.equal(chosen, draw(weights * 1e-6, keys))
    scores = weights.log() + gumbel_noise(keys.unsqueeze(1), torch.arange(5000))
    assert torch.equal(chosen, scores.argmax(dim=1))


@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [1, 2]])
def test_numbers_of_rows_per_request_may_change(counts):
    """If some have none, the requests change too; otherwise only the rows do, in number or place."""
    sampler = Sampler(VOCAB_SIZE, "cpu", EOS)
    generator = random.Random(0)
    requests = [make_row(name, seed=index, **PARAMS[name]) for index, name in enumerate(PARAMS)]
    numbers = (counts * len(requests))[: len(requests)]
    for _ in range(10):
        generator.shuffle(numbers)
        rows = [row for row, number in zip(requests, numbers, strict=True) for _ in range(number)]
        logits = torch.randn(len(rows), VOCAB_SIZE)
        expected = [
            Sampler(VOCAB_SIZE, "cpu", EOS).sample(logits[i : i + 1], [row]).token_ids[0]
            for i, row in enumerate(rows)
        ]
        assert sampler.sample(logits, rows).token_ids == expected


def test_purposes_rounds_and_the_target_share_no_noise():
    """The uniform numbers of each are uncorrelated with all others'."""
    count = 4096
    seeds, starts = torch.arange(count), torch.full((count,), 50)
    streams = [stream_keys(seeds, starts + 2)]
    streams += [round_keys(seeds, starts, starts + 2, purpose) for purpose in Purpose]
    streams += [round_keys(seeds, starts + 1, starts + 2, Purpose.DRAFT)]
    streams += [round_keys(seeds, starts, starts + 3, Purpose.DRAFT)]
    numbers = np.stack([uniform_noise(keys, torch.tensor(7)).numpy() for keys in streams])
    for stream in numbers:
        assert stats.kstest(stream, "uniform").pvalue > 1e-4
    correlations = np.corrcoef(numbers)[np.triu_indices(len(numbers), 1)]
    assert np.abs(correlations).max() * np.sqrt(count) < stats.norm.isf(1e-4 / 2 / len(correlations))
