"""Sampling of each row's next token: `Sampler.sample(logits, rows)`."""

from engine.sampler.grammars import Grammars
from engine.sampler.noise import Purpose, gumbel_noise, round_keys, stream_keys, uniform_noise
from engine.sampler.rows import SamplingRow
from engine.sampler.sampler import SampleOutput, Sampler
from engine.sampler.torch_sampler import TorchSampler, draw

__all__ = [
    "Grammars",
    "Purpose",
    "SampleOutput",
    "Sampler",
    "SamplingRow",
    "TorchSampler",
    "draw",
    "gumbel_noise",
    "round_keys",
    "stream_keys",
    "uniform_noise",
]
