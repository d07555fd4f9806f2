"""Rejection sampling on the GPU gives the verdicts of a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.sampler import Sampler
from protocol.speculation import Verification
from speculation.verification.verify import verify
from tests.engine.interpreted.verification import RULES, VOCAB, Batch, told

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rule", RULES)
def test_verdicts(rule: Verification) -> None:
    for seed in range(50):
        batch = Batch(seed)
        expected = verify(rule, batch.sequences, batch.logits, Sampler(VOCAB, "cpu", [0]))
        sampler = Sampler(VOCAB, CUDA, [0])
        assert sampler.has_kernels
        assert told(verify(rule, batch.sequences, batch.logits.to(CUDA), sampler)) == told(expected)
