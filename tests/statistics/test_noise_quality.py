"""The noise's bits look independent along every axis that a generation walks."""

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampler.noise import noise_bits, stream_keys

ALPHA = 1e-4
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
