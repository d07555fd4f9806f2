"""The likeliest token by its bits, against floats."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampler.ops import likeliest

ROWS = {
    "usual": [-1.5, 0.25, 3.0, 2.0],
    "equals": [1.0, 3.0, -4.0, 3.0],
    "only negative": [-1.5, -0.25, -3.0, -7.0],
    "only zeros": [-0.0, 0.0, 0.0, -0.0],
    "tiny": [0.0, 1e-30, -1e-30, 0.0],
    "masked": [-math.inf, 2.0, -math.inf, 1.0],
    "nothing": [-math.inf] * 4,
    "infinite": [1.0, math.inf, 2.0, 0.0],
    "nan": [1.0, math.nan, 2.0, 0.0],
    "negative nan": [1.0, -math.nan, 2.0, 0.0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ROWS)
def test_it_is_the_first_of_the_greatest(name: str, dtype: torch.dtype) -> None:
    """Alone, and between usual rows."""
    rows = torch.tensor([ROWS["usual"], ROWS[name], ROWS["equals"]], dtype=dtype)
    for logits in (rows, rows[1:2]):
        chosen, failed = likeliest(logits)
        for row, values in enumerate(logits.tolist()):
            usable = not any(map(math.isnan, values)) and math.isfinite(max(values))
            assert (row in failed) != usable
            assert not usable or chosen[row] == values.index(max(values))
