"""The Triton kernels of recurrent layers in Triton's interpreter. `test_interpreted_kernels.py` runs it in a
process of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.recurrent.layout import RecurrentLayer, StateLayout
from engine.recurrent.operators import TorchOperators
from engine.recurrent.seats import Seats
from engine.recurrent.triton_kernel import operators
from engine.recurrent.triton_kernel.operators import TritonOperators
from tests.engine.recurrent_texts import CPU, Text, drafted, served

LAYER = RecurrentLayer(channels=40, taps=4, num_heads=2, num_key_heads=1, key_dim=20, value_dim=18)
LAYERS = {
    "sum": LAYER,
    "delta": LAYER,
    "delta by channel": replace(LAYER, decay_dim=LAYER.key_dim),
    "scan": replace(LAYER, num_heads=18, value_dim=1),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several of everything."""
    monkeypatch.setattr(operators, "_ROWS", 16)
    monkeypatch.setattr(operators, "_PART", 16)
    monkeypatch.setattr(operators, "_HEADS", 16)
    monkeypatch.setattr(operators, "_VALUES", 16)
    monkeypatch.setattr(operators, "_KEPT_COLUMNS", 16)


@pytest.mark.parametrize("rule", LAYERS)
def test_rows_are_what_torch_computes_and_have_the_same_bits_in_any_chunks_and_company(rule: str) -> None:
    texts = [Text(seed, rule, torch.float32, LAYERS, 37) for seed in range(2)]
    alone = served(TritonOperators, texts[:1], None)[0]
    for got, expected in zip(alone, served(TorchOperators, texts[:1], None)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    crowd = served(TritonOperators, texts, random.Random(2))[0]
    assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


@pytest.mark.parametrize(("rule", "trees"), [("delta", True), ("delta by channel", False), ("scan", True)])
def test_drafted_rows_have_the_bits_of_certain_ones_and_leave_nothing_behind(rule: str, trees: bool) -> None:
    layers = {
        name: replace(layer, num_heads=1, value_dim=min(layer.value_dim, 16))
        for name, layer in LAYERS.items()
    }
    text = Text(0, rule, torch.bfloat16, layers, 37)
    whole = served(TritonOperators, [text], None)[0]
    assert drafted(TritonOperators, text, whole, random.Random(0), trees) > 10


def test_what_does_not_fit_is_refused() -> None:
    odd = Seats(StateLayout((LAYER,), torch.float32, grid=24, window=24), 1, CPU)
    with pytest.raises(ValueError, match="a grid of 24 tokens"):
        TritonOperators(odd)
