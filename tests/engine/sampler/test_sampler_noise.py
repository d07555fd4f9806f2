"""The noise is a pure function of (seed, position, token id) that never changes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.sampler import noise
from engine.sampler.noise import (
    MAX_NOISE,
    MIN_NOISE,
    NOISE_SPAN,
    Purpose,
    gumbel_noise,
    noise_bits,
    stream_keys,
)

MASK = 2**64 - 1


def splitmix_finalizer(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_key(seed: int, position: int) -> int:
    return splitmix_finalizer((splitmix_finalizer(seed & MASK) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)


def plain_bits(key: int, token: int) -> int:
    x = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x >> 32


CASES = [
    (0, 0, 0),
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (-1, 7, 42),
    (2**63 - 1, 10**6, 151_935),
    (-(2**63), 3, 9),
]


@pytest.mark.parametrize(("seed", "position", "token"), CASES)
def test_tensor_arithmetic_equals_plain_integers(seed, position, token):
    key = stream_keys(torch.tensor([seed]), torch.tensor([position]))
    assert key.item() & MASK == plain_key(seed, position)
    bits = noise_bits(key, torch.tensor([token]))
    unsigned = plain_bits(plain_key(seed, position), token)
    assert bits.item() % 2**32 == unsigned
    uniform = (((unsigned + 2**31) % 2**32) + 0.5) / 2**32
    expected = np.float32(-np.log(-np.log(uniform)))
    assert gumbel_noise(key, torch.tensor([token])).item() == pytest.approx(expected, abs=1e-6)


def test_known_values():
    """These must never change, or an answer's seed would give another answer."""
    seeds = torch.tensor([0, 1, -5, 2**63 - 1])
    positions = torch.tensor([0, 10, 1000, 77])
    noise = gumbel_noise(stream_keys(seeds, positions), torch.tensor([0, 17, 4095, 151_935]))
    assert noise.tolist() == pytest.approx(KNOWN, abs=1e-6)


KNOWN = [-0.6317655, -0.4147908, 3.3053408, -1.1153921]


def test_noise_does_not_depend_on_the_batch():
    keys = stream_keys(torch.arange(5), torch.full((5,), 9)).unsqueeze(1)
    whole = gumbel_noise(keys, torch.arange(4099))
    assert torch.equal(gumbel_noise(keys, torch.arange(1, 4099, 7)), whole[:, 1::7])
    for row, token in ((0, 0), (3, 4098), (4, 1023)):
        assert torch.equal(gumbel_noise(keys[row], torch.tensor([token])), whole[row, token : token + 1])


def test_range_and_moments():
    noise = gumbel_noise(stream_keys(torch.tensor([3]), torch.tensor([4])), torch.arange(10**6)).double()
    assert noise.min() >= MIN_NOISE and noise.max() <= MAX_NOISE
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.006)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)


def test_the_extremes_are_finite():
    assert pytest.approx(-3.1299, abs=1e-3) == MIN_NOISE
    assert pytest.approx(22.8739, abs=1e-3) == MAX_NOISE


def test_the_compiled_noise_has_the_same_purposes_and_bounds() -> None:
    header = (Path(noise.__file__).parent / "choice.h").read_text()
    (purposes,) = re.findall(r"enum Purpose : int64_t \{(.*)\};", header)
    assert purposes.strip() == ", ".join(f"{each.name} = {each.value}" for each in Purpose)
    most, span = (
        float(re.findall(rf"{name} = ([0-9.]+)f;", header)[0]) for name in ("MAX_NOISE", "NOISE_SPAN")
    )
    assert MAX_NOISE <= most < MAX_NOISE + 0.02 and NOISE_SPAN <= span < NOISE_SPAN + 0.02
