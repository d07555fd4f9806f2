"""Rejection sampling on the GPU gives the verdicts of a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.sampler import Sampler
from protocol.speculation import Verification
from speculation.verification.verify import verify
from tests.speculation.verdicts import BY_CHANCE, VOCAB, Batch, told

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_verdicts(rule: Verification) -> None:
    for seed in range(50):
        batch = Batch.of_each_kind(seed)
        expected = verify(rule, batch.sequences, batch.logits, Sampler(VOCAB, "cpu", [0]))
        sampler = Sampler(VOCAB, CUDA, [0])
        assert sampler.has_kernels
        assert told(verify(rule, batch.sequences, batch.logits.to(CUDA), sampler)) == told(expected)
