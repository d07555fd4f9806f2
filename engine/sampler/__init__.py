"""Chooses each row's next token: `Sampler.sample(logits, rows)`."""

from engine.sampler.grammars import Grammars
from engine.sampler.noise import Purpose, gumbel_noise, round_keys, stream_keys, uniform_noise
from engine.sampler.race import draw
from engine.sampler.sampler import SampleOutput, Sampler, SamplingRow

__all__ = [
    "Grammars",
    "Purpose",
    "SampleOutput",
    "Sampler",
    "SamplingRow",
    "draw",
    "gumbel_noise",
    "round_keys",
    "stream_keys",
    "uniform_noise",
]
