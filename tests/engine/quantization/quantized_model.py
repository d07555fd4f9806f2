"""Writes small random models in each published layout, and returns their dequantized counterparts."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.linear.experts import RoutedQuantizedLinear
from engine.linear.quantized import round_to_nearest
from engine.quantization.formats import Scheme, pack, pack_pairs
from engine.quantization.layout import Layout
from engine.quantization.weight import CodeFormat, QuantizedWeight, StoredLayer

GROUP = 32
VOCAB_SIZE = 300

LAYOUTS: dict[str, tuple[Scheme | None, CodeFormat, int | None]] = {
    "awq": (Scheme("awq", 4, GROUP), CodeFormat.INT4, GROUP),
    "gptq": (Scheme("gptq", 4, GROUP, desc_act=True), CodeFormat.INT4, GROUP),
    "gptq_int8": (Scheme("gptq", 8), CodeFormat.INT8, None),
    "int8": (Scheme("int-quantized", rounds_inputs=True), CodeFormat.INT8, None),
    "fp8": (Scheme("float-quantized"), CodeFormat.FP8, None),
    "packed_int4": (None, CodeFormat.INT4, GROUP),
    "fp8_blocks": (None, CodeFormat.FP8, GROUP),
    "mxfp4": (None, CodeFormat.MXFP4, GROUP),
}
"""By name: the scheme (None for those that Tandem only reads), its code format, and the inputs that share a
scale (None: a whole row).
"""


def method_of(name: str, unquantized: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `quantization_config` of a layout."""
    scheme = LAYOUTS[name][0]
    if name == "fp8_blocks":
        return {"quant_method": "fp8", "weight_block_size": [1, GROUP]}
    return load_reference(name)[0] if scheme is None else Layout.of(scheme).config(unquantized)


def stored(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return a layer's tensors, without its bias."""
    scheme, codes = LAYOUTS[name][0], weight.codes
    if scheme is not None:
        return Layout.of(scheme).write(weight)
    if name == "packed_int4":
        shape = torch.tensor(codes.shape)
        packed = pack(codes, 4)
        return {"weight_packed": packed, "weight_scale": weight.scales, "weight_shape": shape}
    if name == "mxfp4":
        exponents = (weight.scales.log2() + 127).to(torch.uint8)
        return {"weight_packed": pack_pairs(codes), "weight_scale": exponents}
    return {"weight": codes, "weight_scale_inv": weight.scales}


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
"""Fields of a `qwen3_moe`."""


def write_quantized(
    folder: Path,
    model_type: str,
    name: str,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> PreTrainedModel:
    """Write a model in that layout, with the rest in `dtype`. Return its dequantized counterpart in
    float32.
    """
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**_COMMON, **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.save_pretrained(folder)
    dense = copy.deepcopy(model)
    tensors = {path: tensor.to(dtype) for path, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            del tensors[f"{path}.weight"]
            dense.get_submodule(path).weight.data = _store(tensors, name, path, module.weight.detach())
        elif path.endswith(".experts"):
            _store_experts(tensors, name, path, dense.get_submodule(path))
    config.quantization_config = method_of(name, ["lm_head"])
    config.dtype = dtype
    config.save_pretrained(folder)
    save_shards(folder, tensors, shards)
    return dense.eval()


def _store(tensors: dict[str, Tensor], name: str, path: str, dense: Tensor) -> Tensor:
    """Quantize a layer's weight. Return its dequantized values."""
    _, format, group_size = LAYOUTS[name]
    weight = with_zero_points(dense) if name == "awq" else rounded(dense, format, group_size)
    if name == "gptq":
        weight = permuted(weight)
    tensors.update(
        {f"{path}.{suffix}": tensor.contiguous() for suffix, tensor in stored(name, weight).items()}
    )
    return weight.dequantized()


def _store_experts(tensors: dict[str, Tensor], name: str, path: str, experts: nn.Module) -> None:
    """Store experts one by one, as they are published. `experts` gets their dequantized values."""
    for fused in ("gate_up_proj", "down_proj"):
        del tensors[f"{path}.{fused}"]
    for number in range(experts.num_experts):
        gate, up = experts.gate_up_proj.data[number].chunk(2)
        for projection, dense in (("gate", gate), ("up", up), ("down", experts.down_proj.data[number])):
            dense[:] = _store(tensors, name, f"{path}.{number}.{projection}_proj", dense.clone())


def save_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    places = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        part = {name: tensors[name] for name in places if places[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rounded(weight: Tensor, format: CodeFormat, group_size: int | None) -> QuantizedWeight:
    """Quantize with scales that each layout can store: of float16."""
    made = round_to_nearest(weight, format, group_size or weight.shape[1])
    return replace(made, scales=made.scales.half().float())


def with_zero_points(weight: Tensor) -> QuantizedWeight:
    """Quantize to int4 with each group from its least to its greatest value."""
    parts = weight.unflatten(1, (-1, GROUP))
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return QuantizedWeight(CodeFormat.INT4, codes.flatten(1).to(torch.uint8), scales, zeros)


def permuted(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with permuted inputs."""
    inputs = weight.codes.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    # Within a group, inputs keep their order, as a reader of `g_idx` expects.
    order = order.unflatten(0, (-1, weight.group_size)).sort(dim=1).values.flatten()
    return QuantizedWeight(weight.format, weight.codes, weight.scales, weight.zeros, order)


def check_experts(model: nn.Module, exact: nn.Module) -> None:
    """Check that the model's experts stay quantized and give about the same as `exact` in float32."""
    x, chosen = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2], [1, 0]])
    weights = torch.rand(5, 2).bfloat16()
    for layer, like in zip(model.model.layers, exact.model.layers, strict=True):
        own = layer.mlp.experts
        assert isinstance(own.first, RoutedQuantizedLinear) and isinstance(own.second, RoutedQuantizedLinear)
        expected = like.mlp.experts(x.float(), chosen, weights.float())
        assert (own(x, chosen, weights) - expected).abs().max() < 0.02 * expected.abs().max()


FOLDER = Path(__file__).parent / "reference"
NAMES = sorted(path.stem for path in FOLDER.iterdir())
"""One random layer in each layout, packed and dequantized by the library that defines it: AutoAWQ 0.2.9,
GPTQModel 7.7.0, compressed-tensors 0.20.0, Transformers' fine-grained FP8.
"""


def load_reference(name: str) -> tuple[dict[str, Any], StoredLayer, Tensor]:
    """Return the `quantization_config`, the layer, and its library's dequantized values."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    dequantized = tensors.pop("dequantized")
    stored = {key.removeprefix("layer."): tensor for key, tensor in tensors.items()}
    outputs, inputs = dequantized.shape
    return config, StoredLayer("layer", outputs, inputs, stored), dequantized
