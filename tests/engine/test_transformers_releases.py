"""Modules as earlier releases of Transformers have them are described like today's."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

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
