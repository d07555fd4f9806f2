"""Each published layout, packed by the library that defines it, is read to the last bit, and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.quantization.layout import parse_layout
from engine.quantization.weight import CodeFormat, StoredLayer
from protocol.errors import UnsupportedModelError
from tests.engine.quantization.quantized_model import (
    LAYOUTS,
    NAMES,
    load_reference,
    method_of,
    rounded,
    stored,
)

FORMATS = {"fp8": CodeFormat.FP8, "mxfp4": CodeFormat.MXFP4}


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_the_librarys_values(name: str) -> None:
    config, layer, dequantized = load_reference(name)
    layout = parse_layout(config)
    assert layout.is_stored(layer.tensors)
    weight = layout.read(layer)
    expected = CodeFormat.INT8 if "int8" in name else FORMATS.get(name.partition("_")[0], CodeFormat.INT4)
    assert weight.format is expected
    assert (weight.zeros is None) is ("asymmetric" not in name and name != "awq")
    assert (weight.permutation is None) is (name not in WITH_PERMUTATION)
    assert weight.scales.dtype is torch.float32
    assert weight.codes.is_contiguous() and weight.scales.is_contiguous()
    assert weight.dequantized().to(dequantized.dtype).equal(dequantized)


WITH_PERMUTATION = ("gptq_v1_desc_act", "gptq_v2_asymmetric_desc_act", "gptq_v1_int8")


@pytest.mark.parametrize(
    "name", ["awq", "gptq_v1", "gptq_v1_desc_act", "gptq_v1_int8", "int8", "fp8_channel"]
)
def test_it_writes_the_same_tensors(name: str) -> None:
    config, layer, _ = load_reference(name)
    layout = parse_layout(config)
    assert parse_layout(layout.config(["lm_head"])) == layout
    weight = layout.read(layer)
    written = layout.write(weight)
    again = layout.read(replace(layer, tensors=written))
    assert again.dequantized().equal(weight.dequantized())
    for suffix in written.keys() - {"weight", "weight_scale"}:
        assert written[suffix].equal(layer.tensors[suffix]), suffix


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_written_configurations_name_unquantized_layers_and_inputs_of_8_bits(name: str) -> None:
    config = method_of(name, ["lm_head"])
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 8


@pytest.mark.parametrize(
    ("name", "inputs", "rounds"),
    [
        ("int8", {}, True),
        ("int8", {"strategy": "tensor", "dynamic": False}, True),
        ("int8", {"symmetric": False}, False),
        ("int8", {"num_bits": 4}, False),
        ("int8", {"type": "float"}, False),
        ("int8", None, False),
        ("packed_int4", {}, True),
        ("fp8", {}, False),
    ],
)
def test_inputs_are_rounded_if_the_checkpoint_says_so(
    name: str, inputs: dict[str, Any] | None, rounds: bool
) -> None:
    config = method_of(name)
    usual = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = None if inputs is None else usual | inputs
    weight = rounded(torch.randn(32, 64), LAYOUTS[name][1], LAYOUTS[name][2])
    layer = StoredLayer("layer", 32, 64, stored(name, weight))
    assert parse_layout(config).read(layer).input_group == (64 if rounds else 0)


def changed(name: str, suffix: str, change: Any) -> tuple[dict[str, Any], StoredLayer]:
    """Return a layer with one tensor damaged by `change`, or left out if that is None."""
    config, layer, _ = load_reference(name)
    tensors = dict(layer.tensors)
    tensor = tensors.pop(suffix)
    if change is not None:
        tensors[suffix] = change(tensor.clone())
    return config, replace(layer, tensors=tensors)


def with_first(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("awq", "scales", None, "layer.scales: is missing"),
        ("awq", "qzeros", None, "layer.qzeros: is missing"),
        ("awq", "qweight", lambda t: t[:, :2], r"layer.qweight: has shape \[64, 2\], not \[64, 4\]"),
        ("awq", "qweight", lambda t: t.to(torch.int16), "layer.qweight: is int16, not int32"),
        ("awq", "scales", with_first(torch.nan), "layer.scales: has 1 scales that are NaN or infinite"),
        ("gptq_v1", "scales", with_first(torch.inf), "layer.scales: has 1 scales that are NaN or infinite"),
        ("gptq_v1_desc_act", "g_idx", with_first(2), "layer.g_idx: has group 2, not 0 to 1"),
        ("gptq_v1_desc_act", "g_idx", with_first(-1), "layer.g_idx: has group -1, not 0 to 1"),
        ("gptq_v1_desc_act", "g_idx", torch.zeros_like, "layer.g_idx: has 64 inputs in group 0, not 32"),
        ("gptq_v1_desc_act", "g_idx", None, "layer.g_idx: is missing"),
        ("gptq_v1_int8", "qzeros", with_first(0), "layer.qzeros: has zero points of 8 bits other than 128"),
        ("packed_int4", "weight_shape", lambda t: t + 1, r"weight_shape: is \[33, 65\], not \[32, 64\]"),
        ("packed_int4_asymmetric", "weight_zero_point", None, "layer.weight_zero_point: is missing"),
        ("int8", "weight_scale", None, "layer.weight_scale: is missing"),
        ("fp8_channel", "weight", with_first(torch.nan), "layer.weight: has values that are NaN"),
        ("fp8_blocks", "weight_scale_inv", lambda t: t[:1], r"_inv: has shape \[1, 2\], not \[2, 2\]"),
        ("mxfp4", "weight_scale", with_first(255), "layer.weight_scale: has scales that are NaN"),
    ],
)
def test_a_bad_layer_is_refused_by_its_tensor(name: str, suffix: str, change: Any, message: str) -> None:
    config, layer = changed(name, suffix, change)
    with pytest.raises(UnsupportedModelError, match=message):
        parse_layout(config).read(layer)


def test_groups_that_do_not_divide_a_row_are_refused() -> None:
    config, layer, _ = load_reference("awq")
    with pytest.raises(UnsupportedModelError, match="layer: 64 inputs are no multiple of the group size 128"):
        parse_layout({**config, "group_size": 128}).read(layer)


def test_blocks_may_exceed_a_row() -> None:
    rows, columns, block = 20, 96, 64
    codes = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    layer = StoredLayer("layer", rows, columns, {"weight": codes, "weight_scale_inv": scales})
    weight = parse_layout({"quant_method": "fp8", "weight_block_size": [16, block]}).read(layer)
    wide = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    assert weight.dequantized().equal(codes.float() * wide)
    narrow = StoredLayer("layer", rows, 80, {"weight": codes[:, :80], "weight_scale_inv": scales})
    with pytest.raises(UnsupportedModelError, match=r"weight_scale_inv: has blocks of 64 inputs, 80 in all"):
        parse_layout({"quant_method": "fp8", "weight_block_size": [16, block]}).read(narrow)


@pytest.mark.parametrize(("group_of", "is_ordered"), [([-1] * 64, True), ([0, 1] * 32, False)])
def test_compressed_tensors_with_reordered_inputs(group_of: list[int], is_ordered: bool) -> None:
    config, layer, _ = load_reference("packed_int4")
    tensors = {**layer.tensors, "weight_g_idx": torch.tensor(group_of, dtype=torch.int32)}
    weight = parse_layout(config).read(replace(layer, tensors=tensors))
    assert (weight.permutation is None) is is_ordered
    codes = parse_layout(config).read(layer).codes.float() - 8
    columns = torch.arange(64) // 32 if is_ordered else torch.tensor(group_of)
    assert weight.dequantized().equal(codes * layer.tensors["weight_scale"].float()[:, columns])


def test_zero_points_that_are_not_packed() -> None:
    """Older files of compressed-tensors have those of int4 in int8, from -8 on. Those of int8 must be 0."""
    config, layer, dequantized = load_reference("packed_int4_asymmetric")
    zeros = parse_layout(config).read(layer).zeros
    assert zeros is not None
    tensors = {**layer.tensors, "weight_zero_point": (zeros - 8).to(torch.int8)}
    found = parse_layout(config).read(replace(layer, tensors=tensors)).dequantized()
    assert found.to(dequantized.dtype).equal(dequantized)
    config, layer, _ = load_reference("int8")
    tensors = {**layer.tensors, "weight_zero_point": torch.ones(32, 1, dtype=torch.int8)}
    with pytest.raises(UnsupportedModelError, match="zero points of 8 bits other than 0"):
        parse_layout(config).read(replace(layer, tensors=tensors))


def group(**weights: Any) -> dict[str, Any]:
    config, _, _ = load_reference("packed_int4")
    given = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**given, "weights": {**given["weights"], **weights}}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', not one of awq, gptq"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits is 3, not one of 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "group_size is 48, not one of 32, 64, 128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "zero_point is False"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "marlin"}, "format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "bits is 2, not one of 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\], not two sizes"),
        ({**group(), "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized', not one of"),
        ({**group(), "config_groups": {}}, "config_groups is missing"),
        ({**group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        (group(num_bits=3), "num_bits is 3, not one of 4, 8"),
        (group(num_bits=8, symmetric=False), "symmetric is False, not one of True"),
        (group(group_size=16), "group_size is 16, not one of 32, 64, 128"),
    ],
)
def test_a_bad_configuration_is_refused_by_its_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config: .*{message}"):
        parse_layout(config)


def test_a_layer_has_the_scheme_of_the_target_that_names_it() -> None:
    config, layer, dequantized = load_reference("packed_int4")
    groups = {
        "other": group(num_bits=8)["config_groups"]["group_0"],
        "this": config["config_groups"]["group_0"],
    }
    for target in ("layer", "re:la.*r$"):
        mixed = {**config, "config_groups": {**groups, "this": {**groups["this"], "targets": [target]}}}
        assert parse_layout(mixed).read(layer).dequantized().to(dequantized.dtype).equal(dequantized)
    alone = {**config, "config_groups": {"this": {**groups["this"], "targets": ["re:no"]}}}
    with pytest.raises(
        UnsupportedModelError, match="layer: is quantized, but no target in config_groups fits"
    ):
        parse_layout(alone).read(layer)
