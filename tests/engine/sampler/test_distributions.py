"""Filters and penalties, the distributions of tokens, and the noise that draws from them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler import Purpose, Sampler, draw, gumbel_noise, noise, round_keys, stream_keys, uniform_noise
from engine.sampler.edits import Penalties, TokenCounts, apply_edits, edit_lists
from engine.sampler.noise import MAX_NOISE, MIN_NOISE, NOISE_SPAN
from engine.sampler.rows import Batch, RequestParams
from engine.sampler.torch_sampler import apply_filters
from tests.engine.sampler.test_sampler import EOS, crowd
from tests.engine.sampler_reference import distribution, make_row
from tests.engine.sampling_cases import PARAMS

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


def penalized(penalties: Penalties, logits: torch.Tensor, rows) -> torch.Tensor:
    requests, values = RequestParams([row.params for row in rows], VOCAB_SIZE), logits.clone()
    apply_edits(values, edit_lists(rows, requests, range(len(rows)), penalties, [], None))
    return values


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, VOCAB_SIZE)
    rows = [
        make_row("a", [1, 2, 3], [4, 4], repetition_penalty=penalty),
        make_row("b", [9, 9], [1, 7], repetition_penalty=penalty),
    ]
    for index, row in enumerate(rows):
        history = torch.tensor([row.prompt_token_ids + row.output_token_ids])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[index : index + 1].clone())
        assert torch.equal(penalized(Penalties(), logits, rows)[index], expected[0])


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"temperature": 0.5, "top_p": 0.9}, [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.9)]),
        (
            {"min_p": 0.01, "top_k": 30, "top_p": 0.7},
            [MinPLogitsWarper(0.01), TopKLogitsWarper(30), TopPLogitsWarper(0.7)],
        ),
    ],
)
def test_filters_keep_the_same_tokens_as_transformers(params, warpers):
    torch.manual_seed(1)
    logits = 3 * torch.randn(16, VOCAB_SIZE)
    expected = logits.clone()
    for warper in warpers:
        expected = warper(None, expected)
    rows = [make_row(**params)] * 16
    requests = RequestParams([row.params for row in rows], VOCAB_SIZE)
    values = (logits - logits.amax(dim=1, keepdim=True)) / params.get("temperature", 1.0)
    apply_filters(values, Batch(logits, rows, requests, [*range(16)], None, None))
    assert torch.equal(values.isfinite(), expected.isfinite())


def test_counts_follow_the_output_through_growth_jumps_and_rewinds():
    generator = random.Random(0)
    prompt = [generator.randrange(30) for _ in range(20)]
    counts, output = TokenCounts(prompt), []
    for _ in range(300):
        if output and generator.random() < 0.4:
            del output[generator.randrange(len(output)) :]
        output.extend(generator.randrange(400) for _ in range(generator.randrange(6)))
        counts.follow(output)
        token_ids, numbers = counts.entries()
        expected = dict.fromkeys(prompt, 0) | {token: output.count(token) for token in output}
        assert dict(zip(token_ids.tolist(), numbers.tolist(), strict=True)) == expected


def test_forgotten_requests_leave_nothing():
    penalties = Penalties()
    logits = torch.zeros(1, VOCAB_SIZE)
    penalized(penalties, logits, [make_row("a", [], [7], presence_penalty=1.0)])
    penalties.forget("a")
    penalties.forget("unknown")
    fresh = penalized(penalties, logits, [make_row("a", [], [8], presence_penalty=1.0)])
    assert fresh[0, 7] == 0 and fresh[0, 8] == -1
    assert len(penalties._counts) == 1


def test_known_values():
    """These must never change, or an answer's seed would give another answer."""
    seeds = torch.tensor([0, 1, -5, 2**63 - 1])
    positions = torch.tensor([0, 10, 1000, 77])
    noise = gumbel_noise(stream_keys(seeds, positions), torch.tensor([0, 17, 4095, 151_935]))
    assert noise.tolist() == pytest.approx([-0.6317655, -0.4147908, 3.3053408, -1.1153921], abs=1e-6)


def test_noise_does_not_depend_on_the_batch():
    keys = stream_keys(torch.arange(5), torch.full((5,), 9)).unsqueeze(1)
    whole = gumbel_noise(keys, torch.arange(4099))
    assert torch.equal(gumbel_noise(keys, torch.arange(1, 4099, 7)), whole[:, 1::7])
    for row, token in ((0, 0), (3, 4098), (4, 1023)):
        assert torch.equal(gumbel_noise(keys[row], torch.tensor([token])), whole[row, token : token + 1])


def test_range_and_moments():
    assert pytest.approx((-3.1299, 22.8739), abs=1e-3) == (MIN_NOISE, MAX_NOISE)
    noise = gumbel_noise(stream_keys(torch.tensor([3]), torch.tensor([4])), torch.arange(10**6)).double()
    assert noise.min() >= MIN_NOISE and noise.max() <= MAX_NOISE
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.006)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)


def test_the_compiled_noise_has_the_same_bounds() -> None:
    """Too low ones would exclude tokens that only rare noise chooses."""
    header = (Path(noise.__file__).parent / "choice.h").read_text()
    for name, bound in {"MAX_NOISE": MAX_NOISE, "NOISE_SPAN": NOISE_SPAN}.items():
        (compiled,) = re.findall(rf"{name} = ([0-9.]+)f;", header)
        assert bound <= float(compiled) < bound + 0.02
