"""What the Triton kernels of recurrent layers are told of a step with several sequences."""

from __future__ import annotations

import torch

from engine.recurrent.layout import RecurrentLayer, StateLayout
from engine.recurrent.seats import RowSpan
from engine.recurrent.triton_kernel.plan import DRAFTED, tables_of

LAYOUT = StateLayout((RecurrentLayer(8, 4),), torch.float32).with_drafts(16)


def test_each_sequence_whose_drafts_cross_a_grid_point_has_a_state_for_them() -> None:
    crossing = [RowSpan(3, 14, 5, 15), RowSpan(5, 15, 3, 16, [1, 3, 7], 15)]
    spans = [crossing[0], RowSpan(4, 20, 5, 21), crossing[1], crossing[0]]
    tables = tables_of(spans, [0, 16, 0, 0], LAYOUT, 3)
    assert tables.num_drafted == 2
    drafted = [bool((tables.tiles[begin:end, 2] & DRAFTED).any()) for begin, end in tables.sequences[:, 5:7]]
    assert drafted == [True, False, False, True]
    assert tables.sequences[[0, 3], 7].tolist() == [0, 1]
