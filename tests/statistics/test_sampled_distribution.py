"""Noise is as random as it should be, and sampled tokens have the model's distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampler import Sampler, SamplingRow
from engine.sampler.noise import noise_bits, stream_keys
from tests.engine.sampler_reference import distribution, make_row

ALPHA = 1e-4
VOCAB_SIZE = 24
NUM_DRAWS = 8_000
EOS = [0]
PROMPT, OUTPUT = [1, 2, 3, 2], [5, 6, 6, 7, 6]

PARAMS: dict[str, Any] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.08},
    "top_k_top_p_min_p": {"temperature": 1.4, "top_k": 12, "top_p": 0.85, "min_p": 0.03},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.6},
    "bias": {"logit_bias": {4: 2.0, 9: -3.0}},
    "allowed": {"allowed_token_ids": [2, 6, 9, 13, 21]},
    "bans": {"banned_token_sequences": [[3], [6, 11]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [8]},
    "together": {
        "temperature": 0.8,
        "top_k": 15,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "logit_bias": {10: 1.0},
    },
}


def some_logits() -> torch.Tensor:
    return 1.7 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


def draw(logits: torch.Tensor, rows: list[SamplingRow]) -> np.ndarray:
    sampler = Sampler(VOCAB_SIZE, "cpu", EOS)
    return np.array(sampler.sample(logits.expand(len(rows), -1), rows).token_ids)


def rows_across_seeds(count: int = NUM_DRAWS, first_seed: int = 0, position: int | None = None, **params):
    rows = [make_row(f"{params}{i}", PROMPT, OUTPUT, seed=first_seed + i, **params) for i in range(count)]
    for row in rows:
        row.position = row.position if position is None else position
    return rows


def rows_across_positions(count: int = NUM_DRAWS, seed: int = 1234, **params):
    sampling = make_row(seed=seed, **params).params
    return [SamplingRow(sampling, PROMPT, OUTPUT, position, "r") for position in range(count)]


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Test counts by chi-squared, with outcomes expected fewer than five times put together."""
    assert counts[probabilities == 0].sum() == 0, "an impossible outcome was drawn"
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    num_rare = int((np.cumsum(expected[order]) < 5).sum()) + 1
    rare = order[: max(num_rare, int((expected[order] < 5).sum()))]
    common = np.setdiff1d(order, rare)
    observed = np.append(counts[common], counts[rare].sum())
    wanted = np.append(expected[common], expected[rare].sum())
    p_value = stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue
    assert p_value > ALPHA, f"p = {p_value:.2e}"


def histogram(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=VOCAB_SIZE)


@pytest.mark.parametrize("name", PARAMS)
def test_across_seeds(name):
    logits = some_logits()
    rows = rows_across_seeds(**PARAMS[name])
    exact = distribution(logits, rows[0], EOS).numpy()
    assert_fits(histogram(draw(logits, rows)), exact)


@pytest.mark.parametrize("name", ["plain", "top_k_top_p_min_p", "together"])
def test_across_positions(name):
    logits = some_logits()
    rows = rows_across_positions(**PARAMS[name])
    exact = distribution(logits, rows[0], EOS).numpy()
    assert_fits(histogram(draw(logits, rows)), exact)


def pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)


@pytest.mark.parametrize(("name", "distance"), [("plain", 1), ("top_p", 2), ("together", 256)])
def test_positions_are_independent(name, distance):
    logits = some_logits()
    tokens = draw(logits, rows_across_positions(2 * NUM_DRAWS, **PARAMS[name]))
    blocks = (
        tokens.reshape(-1, 2, distance) if distance < 256 else tokens[: 31 * 512].reshape(-1, 2, distance)
    )
    exact = distribution(logits, rows_across_positions(1, **PARAMS[name])[0], EOS).numpy()
    assert_fits(pairs(blocks[:, 0].ravel(), blocks[:, 1].ravel()), np.outer(exact, exact).ravel())


@pytest.mark.parametrize("first_seed", [-(2**63), 2**63 - 2 * NUM_DRAWS])
def test_neighbouring_seeds_are_independent(first_seed):
    logits = some_logits()
    rows = rows_across_seeds(2 * NUM_DRAWS, first_seed)
    tokens = draw(logits, rows).reshape(-1, 2)
    exact = distribution(logits, rows[0], EOS).numpy()
    assert_fits(pairs(tokens[:, 0], tokens[:, 1]), np.outer(exact, exact).ravel())


def test_a_greater_seed_at_an_earlier_position_is_independent_too():
    """A key that merely added seed and position would repeat itself here."""
    logits = some_logits()
    here = draw(logits, rows_across_seeds(first_seed=0, position=101))
    there = draw(logits, rows_across_seeds(first_seed=1, position=100))
    exact = distribution(logits, rows_across_seeds(1)[0], EOS).numpy()
    assert_fits(pairs(here, there), np.outer(exact, exact).ravel())


def test_each_row_of_a_mixed_batch_has_its_own_distribution():
    logits = some_logits()
    names = list(PARAMS)
    rows = [row for name in names for row in rows_across_seeds(1500, 50_000, **PARAMS[name])]
    order = np.random.default_rng(0).permutation(len(rows))
    tokens = np.empty(len(rows), dtype=np.int64)
    tokens[order] = draw(logits, [rows[i] for i in order])
    for index in range(len(names)):
        exact = distribution(logits, rows[1500 * index], EOS).numpy()
        assert_fits(histogram(tokens[1500 * index : 1500 * (index + 1)]), exact)


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        ({"top_k": 6}, {"top_k": 5}),
        ({"top_p": 0.75}, {"top_p": 0.6}),
        ({"temperature": 0.9}, {}),
        ({"min_p": 0.08}, {"min_p": 0.12}),
        ({"frequency_penalty": 0.2}, {"presence_penalty": 0.2}),
    ],
)
def test_a_filter_that_is_slightly_off_is_caught(drawn, claimed):
    """So many draws have the power to show it."""
    tokens = draw(some_logits(), rows_across_seeds(**drawn))
    exact = distribution(some_logits(), rows_across_seeds(1, **claimed)[0], EOS).numpy()
    with pytest.raises(AssertionError):
        assert_fits(histogram(tokens), exact)


SIDE = 256


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """Return uniforms in [0, 1), of the inputs' broadcast shape."""
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    return (noise_bits(stream_keys(seeds.clone(), positions), tokens).numpy() + 2.0**31) / 2.0**32


def walk(axis: str, first: int) -> np.ndarray:
    """Return uniforms [SIDE, SIDE]: neighbours along the last axis differ by one in `axis`."""
    ahead = torch.arange(first, first + SIDE).unsqueeze(0)
    other = torch.arange(SIDE).unsqueeze(1)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return {
        "tokens": lambda: uniforms(other, zero + 5, ahead),
        "positions": lambda: uniforms(other, ahead, zero + 7),
        "seeds": lambda: uniforms(ahead, other, zero + 7),
        "seed and position": lambda: uniforms(ahead, ahead.flip(1) + other, zero + 7),
    }[axis]()


@pytest.mark.parametrize("first", [0, 2**31 - 100])
@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "seed and position"])
def test_neighbours_are_uniform_and_independent(axis, first):
    values = walk(axis, first)
    cells = 16
    first_cells = (values[:, 0::2] * cells).astype(int)
    second_cells = (values[:, 1::2] * cells).astype(int)
    counts = np.bincount((first_cells * cells + second_cells).ravel(), minlength=cells**2)
    assert stats.chisquare(counts).pvalue > ALPHA
    assert stats.kstest(values.ravel(), "uniform").pvalue > ALPHA


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "seed and position"])
@pytest.mark.parametrize("distance", [1, 2, 4, 16, 64, 128])
def test_no_correlation_at_any_distance(axis, distance):
    values = walk(axis, 0)
    correlation = np.corrcoef(values[:, :-distance].ravel(), values[:, distance:].ravel())[0, 1]
    count = values[:, :-distance].size
    assert abs(correlation) * np.sqrt(count) < stats.norm.isf(ALPHA / 2)


def test_every_output_bit_depends_on_every_input_bit():
    """Flipping one bit of the seed, the position or the token flips each output bit half of the time."""
    count = 4096
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 2**20, (count,), generator=generator)
    tokens = torch.randint(0, 2**18, (count,), generator=generator)

    def bits(seeds, positions, tokens):
        return noise_bits(stream_keys(seeds, positions), tokens)

    base = bits(seeds, positions, tokens)
    shifts = torch.arange(32)
    for bit in range(63):
        others = [bits(seeds ^ (1 << bit), positions, tokens)]
        if bit < 20:
            others.append(bits(seeds, positions ^ (1 << bit), tokens))
        if bit < 18:
            others.append(bits(seeds, positions, tokens ^ (1 << bit)))
        for other in others:
            flipped = (((base ^ other).unsqueeze(1) >> shifts) & 1).double().mean(dim=0)
            assert (flipped - 0.5).abs().max() < 6 * 0.5 / count**0.5
