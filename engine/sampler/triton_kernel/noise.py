"""The noise of `engine.sampler.noise` in Triton, and a map from float32 to integers in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.noise import NOISE_SPAN

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_SLACK = tl.constexpr(1e-6)
"""The greatest error of bounds computed in float32."""
ROUNDING = tl.constexpr(1e-4)
"""More than the rounding of a value + noise."""
UNIT = tl.constexpr(2.0**50)
"""Weights, the exp of values of at most 0, are integers in units of 1 / UNIT. A tile's sum fits int64."""
SPAN = tl.constexpr(NOISE_SPAN)
LEAST = tl.constexpr(-0x7F800001)
"""The `order` of -inf."""


@triton.jit
def _mix_upper(x):
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    return (x ^ (x >> 27)) * _MULTIPLIER_2


@triton.jit
def _mix(x):
    x = _mix_upper(x)
    return x ^ (x >> 31)


@triton.jit
def stream_key(seed, position):
    """Return the uint64 key of an int64 seed and position."""
    return _mix(_mix(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * _GAMMA)


@triton.jit
def noise_bits(key, tokens):
    """Return uniform int32 bits; the noise grows with them."""
    return (_mix_upper(key + (tokens.to(tl.int64) + 1).to(tl.uint64) * _GAMMA) >> 32).to(tl.int32)


@triton.jit
def uniform(bits):
    """Map `noise_bits` to a float64 in (0, 1)."""
    return (bits.to(tl.float64) + 2147483648.5) * 2.3283064365386963e-10  # 2**-32


@triton.jit
def gumbel(bits):
    """Map `noise_bits` to float32 Gumbel noise, by float64 logarithms, which are slow on many devices."""
    return (-tl.log(-tl.log(uniform(bits)))).to(tl.float32)


@triton.jit
def about_gumbel(bits):
    """Return `gumbel` within `ROUNDING`, by float32 alone."""
    tail = ((2147483647 - bits.to(tl.int64)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits.to(tl.int64) + 2147483648).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = tail * (1.0 + tail * (0.5 + tail * (0.33333333 + tail * (0.25 + tail * 0.2))))
    return -tl.log(tl.where(tail < 0.03, series, -tl.log(rest)))


@triton.jit
def may_reach(values, bits, bar):
    """Return whether value + noise can exceed `bar`, by a bound that is cheap to compute: -log u >= 1 - u.
    Few tokens pass.
    """
    tail = 0.5 - bits.to(tl.float32) * 2.3283064365386963e-10
    return tl.exp(tl.minimum(values - bar, 1.0)) - tail >= -_SLACK


@triton.jit
def order(values):
    """Map float32 to int32 in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def at_order(number):
    """Return the value with this `order`."""
    return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
