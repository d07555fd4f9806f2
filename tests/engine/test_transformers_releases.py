"""Modules as earlier releases of Transformers have them are described like today's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.devices.torch.recurrent_hooks import hook
from engine.model.describe import _group_size
from engine.model.program import Rotation


class RotaryOfSeveralAxes:
    """Qwen3.5's rotary embedding in release 5.17: it takes the places in time, height and width."""

    mrope_section = (2, 1, 1)

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rates = torch.tensor([1.0, 0.5, 0.25, 0.125]).view(1, 1, 4, 1).expand(3, position_ids.shape[1], -1, 1)
        angles = (rates @ position_ids[:, :, None, :].float()).transpose(2, 3)[0]
        return angles.cos(), angles.sin()


def test_a_rotary_embedding_of_several_axes_gets_the_places_of_each() -> None:
    cosines, sines = Rotation(RotaryOfSeveralAxes()).tables(6, torch.ones(3, 3))
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    torch.testing.assert_close(cosines, angles.cos())
    torch.testing.assert_close(sines, angles.sin())


def test_a_norm_that_knows_no_groups_has_one() -> None:
    """Bamba's and Granite 4's in release 5.17."""
    weight = torch.ones(48)
    assert _group_size(SimpleNamespace(weight=weight)) == 48
    assert _group_size(SimpleNamespace(weight=weight, n_groups=4)) == 12
    assert _group_size(SimpleNamespace(weight=weight, group_size=16)) == 16


def torch_chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, **_: Tensor) -> Any:
    raise AssertionError("our operators run in its place")


class DeltaRule(nn.Module):
    """A layer with two heads of keys for four of values; release 5.17 repeats them for the rule."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.layer_idx, self.num_k_heads, self.repeats = 0, 2, repeats

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        repeated = keys.repeat_interleave(self.repeats, dim=2)
        ones = torch.ones(values.shape[:3])
        out: Tensor = torch_chunk_gated_delta_rule(repeated, repeated, values, g=-ones, beta=ones)[0]
        return out


class Recording:
    """Operators that keep the keys that they get."""

    def linear_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        self.keys = k
        return v


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_delta_rule_gets_each_head_of_keys_once(repeats: int) -> None:
    """As decoders have them: they take the number of heads in a layer's state for that in its products."""
    layer, operators = DeltaRule(repeats), Recording()
    hooks = hook(layer)
    assert hooks is not None
    hooks.operators = operators
    keys, values = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4, 3)
    assert torch.equal(layer(keys, values)[0], values[0])
    assert torch.equal(operators.keys, keys[0])
