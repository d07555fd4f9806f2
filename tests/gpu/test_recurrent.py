"""Triton kernels of recurrent layers on the GPU, compared with the papers' recurrences in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.kv.state_slots import RecurrentLayer
from tests.engine.recurrent_texts import Text, drafted, served, token_by_token

CUDA = torch.device("cuda")
LAYER = RecurrentLayer(channels=640, taps=4, num_heads=4, num_key_heads=2, key_dim=128, value_dim=128)
LAYERS = {
    "sum": replace(LAYER, value_dim=64),
    "delta": LAYER,
    "delta by channel": replace(LAYER, decay_dim=128),
}


@pytest.mark.parametrize("rule", LAYERS)
def test_rows_have_the_same_bits_in_any_chunks_and_batches(rule: str) -> None:
    texts = [Text(seed, rule, torch.bfloat16, LAYERS, 150) for seed in range(4)]
    alone = served(TritonOperators, texts[:1], None, CUDA)[0]
    for got, exact in zip(alone, token_by_token(texts[0]), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    for seed in range(4):
        crowd = served(TritonOperators, texts, random.Random(seed), CUDA)[0]
        assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_rows_have_the_bits_of_committed_ones(rule: str, trees: bool) -> None:
    text = Text(0, rule, torch.bfloat16, LAYERS)
    whole = served(TritonOperators, [text], None, CUDA)[0]
    for seed in range(6):
        drafted(TritonOperators, text, whole, random.Random(seed), trees, CUDA)
