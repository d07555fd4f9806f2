"""Weights on CUDA devices: products of one input are joined, and experts stay as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.joined_products import packed_of, stacked
from engine.devices.cuda.products import TiledLinear
from engine.devices.torch.operations import side_by_side
from engine.model.program import Layer, MixerKind, Product, Recurrent
from tests.engine.devices.expert_memory import EXPERT_MODELS, dense_bytes, weight_bytes


def mixer_of(gates: nn.Module) -> Recurrent:
    inputs, output = (Product((nn.Linear(8, size),)) for size in (6, 8))
    return Recurrent(
        kind=MixerKind.DELTA,
        inputs=inputs,
        output=output,
        number=0,
        taps=torch.empty(0),
        bias=None,
        gates=Product((gates,)),
    )


@torch.inference_mode()
def test_one_product_makes_a_recurrent_mixers_inputs_and_gates() -> None:
    mixer, x = mixer_of(nn.Linear(8, 2, bias=False)), torch.randn(3, 8)
    assert mixer.gates is not None
    linears = mixer.inputs.linears + mixer.gates.linears
    expected = side_by_side([linear(x) for linear in linears])
    products = packed_of(Layer((mixer,), None), None)
    assert products.keys() == {mixer.inputs, mixer.output}
    torch.testing.assert_close(products[mixer.inputs](x, None), expected)
    assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1


def test_gates_of_another_format_have_a_product_of_their_own() -> None:
    mixer = mixer_of(TiledLinear.plain(torch.randn(2, 8), None))
    assert packed_of(Layer((mixer,), None), None).keys() == {mixer.inputs, mixer.gates, mixer.output}


def test_stacked_weights_are_of_equal_layers_without_biases() -> None:
    layers = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    expected = torch.stack([layer.weight.detach() for layer in layers])
    found = stacked(layers)
    assert found is not None
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() == layers[1].weight.untyped_storage().data_ptr()
    assert stacked((layers[0], nn.Linear(4, 5, bias=False))) is None
    assert stacked((layers[0], nn.Linear(4, 6))) is None
    assert stacked((layers[0], TiledLinear.plain(torch.randn(6, 4), None))) is None


MOST = {"gpt-oss-120b in MXFP4": 66e9, "Qwen3-30B-A3B in bf16": 61.2e9, "Qwen3-30B-A3B in int4": 18e9}
"""gpt-oss-120b fits one GPU of 80 GB."""


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_weights_take_no_more_memory_than_their_codes_and_scales(name: str) -> None:
    found, dense = weight_bytes(name), dense_bytes(name)
    assert sum(found.values()) < MOST[name]
    assert sum(found.values()) <= dense
    if "MXFP4" in name:
        assert 16 * found["experts"] / (dense - found["other"]) == pytest.approx(4.25, abs=0.02), "bits"
