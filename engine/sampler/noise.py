"""Gumbel noise from a counter-based generator, keyed by (seed, position, token id).

The generator has no state: noise is a pure function of these three, and independent of the batch, the device
and the other tokens that are examined. `argmax(log p + noise)` then draws from p (the Gumbel-max trick). The
mixing function is SplitMix64's (Steele, Lea, Flood 2014, with Stafford's constants), with streams keyed by
the function's own output.
"""

from __future__ import annotations

import enum
import math

import numpy as np
import torch
from torch import Tensor

RESOLUTION_BITS = 32
_STEP = 2.0**-RESOLUTION_BITS
_HALF = 2 ** (RESOLUTION_BITS - 1)
MIN_NOISE = -math.log(-math.log(0.5 * _STEP))
MAX_NOISE = -math.log(-math.log1p(-0.5 * _STEP))
NOISE_SPAN = MAX_NOISE - MIN_NOISE + 0.01
"""Greatest difference of noise: none lifts a token above one whose log-probability is greater by this."""


class Purpose(enum.IntEnum):
    """Draws of a speculative round other than the target's own tokens. `choice.h` has the same numbers."""

    DRAFT = 1
    ACCEPTANCE = 2
    RECOVERY = 3


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def stream_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a 64-bit key per row. `seeds` and `positions` are int64 of one shape; seeds may be negative."""
    return _mix(_mix(seeds.clone()) + (positions + 1) * _GAMMA)


def round_keys(seeds: Tensor, starts: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Return a 64-bit key per row, for noise that no other purpose and no other round shares.

    `starts` are the positions at which the rows' rounds begin. A position may be drafted in several rounds.
    The outcome of a round depends on its noise at the position, so the next round needs independent noise.
    All are int64 [n].
    """
    return stream_keys(_round_streams(seeds, starts, purpose), positions)


def round_seeds(seeds: np.ndarray, starts: np.ndarray, purpose: Purpose) -> np.ndarray:
    """Return seeds for which `stream_keys` gives the keys of `round_keys`."""
    return _round_streams(torch.from_numpy(seeds), torch.from_numpy(starts), purpose).numpy()


def _round_streams(seeds: Tensor, starts: Tensor, purpose: Purpose) -> Tensor:
    purposes = stream_keys(seeds, torch.full_like(seeds, -1 - purpose))  # at positions that no token has
    return stream_keys(purposes, starts)


def uniform_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return float64 noise, uniform in (0, 1); the two int64 inputs broadcast."""
    return noise_bits(keys, token_ids).double().add_(_HALF + 0.5).mul_(_STEP)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, in [`MIN_NOISE`, `MAX_NOISE`]; the two int64 inputs broadcast.

    Logarithms are computed in float64 and rounded once, so that devices agree whose logarithms differ in the
    last place.
    """
    return uniform_noise(keys, token_ids).log_().neg_().log_().neg_().float()


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the bits of noise: int64, uniform in [-2**31, 2**31). Noise increases with them.

    The last step of the mixing is left out, since it would change only one of these upper bits.
    """
    return _mix_upper(keys + (token_ids + 1) * _GAMMA).bitwise_right_shift_(64 - RESOLUTION_BITS)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64 with wraparound; overwrite `x`."""
    x = _mix_upper(x)
    x ^= _shift_right(x, 31)
    return x


def _mix_upper(x: Tensor) -> Tensor:
    x ^= _shift_right(x, 30)
    x *= _MULTIPLIER_1
    x ^= _shift_right(x, 27)
    x *= _MULTIPLIER_2
    return x


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift logically; torch's own shift is arithmetic."""
    return torch.bitwise_right_shift(x, count).bitwise_and_((1 << (64 - count)) - 1)
