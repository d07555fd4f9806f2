"""The Triton kernels of recurrent layers in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.devices.cuda.recurrent import operators
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.torch.recurrent import TorchOperators
from engine.kv.state_slots import RecurrentLayer
from tests.engine.recurrent_texts import Text, drafted, served, served_ahead

LAYER = RecurrentLayer(channels=40, taps=4, num_heads=2, num_key_heads=1, key_dim=20, value_dim=18)
LAYERS = {
    "sum": LAYER,
    "delta": LAYER,
    "delta by channel": replace(LAYER, decay_dim=LAYER.key_dim),
    "scan": replace(LAYER, num_heads=18, value_dim=1),
}


@pytest.fixture(autouse=True)
def smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles, so that there are several of everything."""
    monkeypatch.setattr(operators, "_ROWS", 16)
    monkeypatch.setattr(operators, "_PART", 16)
    monkeypatch.setattr(operators, "_HEADS", 16)
    monkeypatch.setattr(operators, "_KEPT_COLUMNS", 16)


@pytest.mark.parametrize("rule", LAYERS)
def test_rows_equal_torchs_and_have_the_same_bits_in_any_chunks_and_batch(rule: str) -> None:
    texts = [Text(seed, rule, torch.float32, LAYERS, 37) for seed in range(2)]
    alone = served(TritonOperators, texts[:1], None)[0]
    for got, expected in zip(alone, served(TorchOperators, texts[:1], None)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    crowd = served(TritonOperators, texts, random.Random(2))[0]
    assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


@pytest.mark.parametrize("rule", ["delta by channel", "scan"])
def test_rows_run_ahead_have_the_bits_of_committed_ones(rule: str) -> None:
    text = Text(0, rule, torch.bfloat16, LAYERS, 35)
    whole = served(TritonOperators, [text], None)[0]
    assert all(map(torch.equal, served_ahead(TritonOperators, text, random.Random(0)), whole))


def test_grids_smaller_than_a_matrix_tile() -> None:
    texts = [Text(0, "delta", torch.float32, LAYERS, 11)]
    outputs = [served(kind, texts, random.Random(0), grid=4)[0] for kind in (TritonOperators, TorchOperators)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "trees", "seeds"),
    [("delta", True, (1, 11)), ("delta by channel", False, (0,)), ("scan", True, (1,))],
)
def test_drafted_rows_have_the_bits_of_committed_ones_and_leave_nothing_behind(
    rule: str, trees: bool, seeds: tuple[int, ...]
) -> None:
    """The trees' seeds give one whose root ends a grid, and one with branches across a grid point."""
    layer = replace(LAYERS[rule], num_heads=1, value_dim=min(LAYERS[rule].value_dim, 16))
    text = Text(0, rule, torch.bfloat16, {rule: layer}, 37)
    whole = served(TritonOperators, [text], None)[0]
    assert sum(drafted(TritonOperators, text, whole, random.Random(seed), trees) for seed in seeds) > 10
