"""Makes `reference/`: one small layer in each layout, packed and dequantized by the library that defines it.

Run it where AutoAWQ 0.2.9, GPTQModel 7.7.0 and compressed-tensors 0.20.0 can be imported: their Python code
is enough. Each file has the layer's tensors as in a checkpoint (`layer.*`), the library's `dequantized`
weight, [out_features, in_features], and as metadata the `quantization_config` of config.json.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "reference"
OUT, IN, GROUP = 32, 64, 32


def save(name: str, config: dict[str, Any], tensors: dict[str, Tensor], dequantized: Tensor) -> None:
    stored = {f"layer.{suffix}": tensor.detach().contiguous().clone() for suffix, tensor in tensors.items()}
    stored["dequantized"] = dequantized.detach().contiguous().clone()
    save_file(stored, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def weights(rows: int = OUT, columns: int = IN) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05


def grid(group_size: int, bits: int, symmetric: bool, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales (float16 values) and zero points of groups of columns, [out_features, groups]."""
    parts = (weights() if order is None else weights()[:, order]).unflatten(1, (-1, group_size))
    if symmetric:
        scales = parts.abs().amax(-1) / (2 ** (bits - 1) - 1)
        return scales.half().float(), torch.full_like(scales, 2 ** (bits - 1))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(0, 2**bits - 1)


def linear() -> nn.Linear:
    layer = nn.Linear(IN, OUT, bias=False)
    layer.weight.data = weights()
    return layer


def make_awq() -> None:
    stub = types.ModuleType("datasets")  # AutoAWQ imports it for its calibration
    stub.load_dataset, stub.__spec__ = None, ModuleSpec("datasets", None)  # type: ignore[attr-defined]
    sys.modules.setdefault("datasets", stub)
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = grid(GROUP, 4, symmetric=False)
    packed = WQLinear_GEMM.from_linear(linear(), 4, GROUP, scales=scales.T, zeros=zeros.T)
    dequantized = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    save("awq", config, tensors, dequantized)


def make_gptq(name: str, bits: int, version: int, symmetric: bool, desc_act: bool) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    order = torch.randperm(IN, generator=torch.Generator().manual_seed(2)) if desc_act else torch.arange(IN)
    scales, zeros = grid(GROUP, bits, symmetric, order)
    group_of = torch.empty(IN, dtype=torch.int32)
    group_of[order] = torch.arange(IN, dtype=torch.int32) // GROUP
    packed = TorchLinear(
        bits=bits,
        group_size=GROUP,
        sym=symmetric,
        desc_act=desc_act,
        in_features=IN,
        out_features=OUT,
        register_buffers=True,
    )
    packed.pack_original(linear(), scales, zeros, group_of)
    packed.post_init()
    dequantized = packed.dequantize_weight().T
    if version == 1:
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=GROUP))
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    tensors = {suffix: getattr(packed, suffix) for suffix in ("qweight", "qzeros", "scales", "g_idx")}
    save(name, config, tensors, dequantized)


def make_compressed(
    name: str, format: str, rows: int = OUT, activations: bool = False, **options: Any
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**options)
    inputs = (
        QuantizationArgs(num_bits=8, type=args.type, strategy="token", dynamic=True) if activations else None
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    weight = weights(rows).to(torch.bfloat16)
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = nn.functional.pad(weight, (0, 0, 0, -rows % height))
        parts = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
    else:
        parts = weight.unflatten(1, (-1, args.group_size or IN))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale.reshape(1) if args.strategy == "tensor" else scale}
    state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    compressed = compressor.compress(state, scheme)
    dequantized = compressor.decompress(compressed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    save(name, config, compressed, dequantized)


def make_fp8_blocks() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, (rows, columns) = weights(), (16, 32)
    scales = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    dequantized = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    save("fp8_blocks", config, {"weight": codes, "weight_scale_inv": scales}, dequantized)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    make_awq()
    make_gptq("gptq_v1", 4, 1, symmetric=True, desc_act=False)
    make_gptq("gptq_v1_desc_act", 4, 1, symmetric=True, desc_act=True)
    make_gptq("gptq_v1_asymmetric", 4, 1, symmetric=False, desc_act=False)
    make_gptq("gptq_v2_asymmetric_desc_act", 4, 2, symmetric=False, desc_act=True)
    make_gptq("gptq_v1_int8", 8, 1, symmetric=True, desc_act=True)
    grouped = {"strategy": "group", "group_size": GROUP}
    make_compressed("packed_int4", "pack-quantized", num_bits=4, **grouped)
    make_compressed("packed_int4_asymmetric", "pack-quantized", num_bits=4, symmetric=False, **grouped)
    make_compressed("packed_int8", "pack-quantized", num_bits=8, strategy="channel")
    make_compressed("int8", "int-quantized", activations=True, num_bits=8, strategy="channel")
    floats = {"num_bits": 8, "type": "float", "activations": True}
    make_compressed("fp8_tensor", "float-quantized", strategy="tensor", **floats)
    make_compressed("fp8_channel", "float-quantized", strategy="channel", **floats)
    make_compressed(
        "fp8_compressed_blocks", "float-quantized", 40, strategy="block", block_structure=[16, 32], **floats
    )
    make_compressed("mxfp4", "mxfp4-pack-quantized", num_bits=4, type="float", **grouped)
    make_fp8_blocks()


if __name__ == "__main__":
    main()
