"""Fused experts in packed form: right to bfloat16's last bits, and the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.linear.experts import (
    ExpertsModule,
    RoutedLinear,
    RoutedQuantizedLinear,
    join_experts,
    pack_experts,
)
from engine.linear.packed_quantized import pack_quantized_linears
from engine.quantization.weight import CodeFormat
from tests.engine.expert_models import CONFIGS, FORMATS, both, experts_of, routing
from tests.engine.kernels import needs_kernel

pytestmark = needs_kernel
BF16 = torch.bfloat16


def packed(name: str, format: CodeFormat | None) -> tuple[nn.Module, ExpertsModule]:
    """Return the experts computed by Transformers in float32 with rounded weights, and ours."""
    plain, model = both(name, format, BF16, by_kernel=True)
    if format is None:
        pack_experts(model)
    else:
        pack_quantized_linears(model)
        join_experts(model)
    ours = experts_of(model)
    assert isinstance(ours, ExpertsModule)
    return plain, ours


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_equal_transformers(name: str, format: CodeFormat | None) -> None:
    plain, ours = packed(name, format)
    expected = RoutedLinear if format is None else RoutedQuantizedLinear
    assert isinstance(ours.first, expected) and isinstance(ours.second, expected)
    for rows in (1, 5, 70):
        hidden, chosen, weights = routing(rows, BF16)
        exact = plain(hidden.float(), chosen, weights.float())
        assert (ours(hidden, chosen, weights) - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, format: CodeFormat | None) -> None:
    _, ours = packed(name, format)
    hidden, chosen, weights = routing(200, BF16)
    alone = torch.cat([ours(hidden[r : r + 1], chosen[r : r + 1], weights[r : r + 1]) for r in range(8)])
    for rows in (8, 50, 200):
        assert torch.equal(ours(hidden[:rows], chosen[:rows], weights[:rows])[:8], alone)


def test_a_missing_expert_gives_zeros() -> None:
    layer = RoutedLinear(torch.ones(2, 3, 4).bfloat16(), None)
    out = layer(torch.ones(2, 4).bfloat16(), torch.tensor([1, 2, -1, 0]))
    assert out.tolist() == [[4, 4, 4], [0, 0, 0], [0, 0, 0], [4, 4, 4]]


def test_unsupported_inputs_are_refused() -> None:
    layer = RoutedLinear(torch.ones(2, 3, 4).bfloat16(), None)
    with pytest.raises(ValueError, match="4 features for 3 experts"):
        layer(torch.ones(2, 4).bfloat16(), torch.tensor([1, 0, 1]))
