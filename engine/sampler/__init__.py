"""Chooses each row's next token: `Sampler.sample(logits, rows)`."""

from engine.sampler.noise import gumbel_noise, stream_keys
from engine.sampler.sampler import SampleOutput, Sampler, SamplingRow

__all__ = ["SampleOutput", "Sampler", "SamplingRow", "gumbel_noise", "stream_keys"]
