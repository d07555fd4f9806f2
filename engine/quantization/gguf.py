"""The tensors of a GGUF file as weights of a Transformers model.

Blocks stay quantized if a `QuantizedWeight` can hold their values; ggml's `ggml-common.h` defines their
layouts. The package `gguf` dequantizes the other types.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints.gguf.families import FAMILIES
from checkpoints.gguf.reader import GgufFile, GgufTensor
from engine.quantization.formats import powers
from engine.quantization.weight import CodeFormat, QuantizedWeight, StoredWeights, dtype_name, placeholder

logger = logging.getLogger("tandem.engine")

_BLOCK = 32
"""Number of values that share a scale in the types that stay quantized."""
_VALUES_AT_ONCE = 1 << 18
"""Number of values that are dequantized at once: few, so that they stay in a core's cache."""
_BLOCK_NUMBER = re.compile(r"\.(\d+)\.")
_FLOATS = ("F32", "F16", "BF16")
_UNUSED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors whose content is in `config.json`."""
_EXPERT_LAYERS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def read_weights(
    file: GgufFile, empty: PreTrainedModel, experts: Iterable[str], dtype: torch.dtype, device: torch.device
) -> StoredWeights:
    """Read the tensors that the model `empty`, with fused `experts` at these paths, needs: quantized weights
    to `device`, the rest to the CPU.

    Log the types that were dequantized. Raises GgufError, naming a tensor.
    """
    if file.architecture not in FAMILIES:
        return _read_with_transformers(file, empty, dtype)
    reader = _Reader(file, empty, dtype, device)
    linears = {f"{name}.weight": name for name, each in empty.named_modules() if type(each) is nn.Linear}
    is_tied = empty.config.tie_word_embeddings
    for parameter in empty.state_dict():
        if not is_tied or parameter not in (empty._tied_weights_keys or ()):
            reader.read(parameter, linears.get(parameter))
    for path in experts:
        reader.read_experts(path)
    if is_tied:
        reader.read_tied_head()
    reader.finish()
    return reader.found


def _read_with_transformers(file: GgufFile, empty: PreTrainedModel, dtype: torch.dtype) -> StoredWeights:
    """Read an architecture that only Transformers' reader knows. It dequantizes all tensors."""
    try:
        read = load_gguf_checkpoint(
            str(file.path), return_tensors=True, model_to_load=empty, torch_dtype=dtype
        )
    except Exception as error:  # the reader assumes the tensors of a whole file
        file.fail(f"Transformers cannot read its tensors: {error!r}")
    logger.info("%s: %s is dequantized to %s", file.path, file.architecture, dtype_name(dtype))
    return StoredWeights(read["tensors"])


class _Reader:
    """A reader that finds the file's tensors for the model's parameters."""

    def __init__(
        self, file: GgufFile, empty: PreTrainedModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.found = StoredWeights()
        self._file = file
        self._empty = empty
        self._wanted = empty.state_dict()
        self._dtype = dtype
        self._device = device
        self._config = empty.config.get_text_config(decoder=True)
        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(kinds[file.architecture], self._config.num_hidden_layers)
        self._used: set[str] = set()
        self._dequantized: Counter[str] = Counter()

    def read(self, parameter: str, linear: str | None) -> None:
        """Read a parameter, if the file has it. `linear` is the name of its linear layer, if any."""
        layer, _, suffix = parameter.rpartition(".")
        if suffix == "sinks":
            layer, suffix = parameter, "weight"
        tensor = self._file.tensors.get(f"{self._names.get_name(layer)}.{suffix}")
        if tensor is None:
            return
        self._used.add(tensor.name)
        wanted = self._wanted[parameter]
        if tensor.shape != wanted.shape and (1, *tensor.shape) != wanted.shape:
            self._file.fail(f"tensor {tensor.name}: has shape {list(tensor.shape)}, not {list(wanted.shape)}")
        if linear is not None and self._stays_quantized(tensor, linear, self.found.linears):
            self.found.plain[parameter] = placeholder(wanted)
        else:
            self.found.plain[parameter] = self._plain(tensor).view(wanted.shape)
            if linear is not None:
                self._dequantized[tensor.type.name] += 1

    def read_tied_head(self) -> None:
        """Read the embeddings again, for the tied head: their own format has fewer bytes."""
        head = self._empty.get_output_embeddings()
        name = next((name for name, each in self._empty.named_modules() if each is head), None)
        tensor = self._file.tensors.get("token_embd.weight")
        if name is not None and tensor is not None:
            self._stays_quantized(tensor, name, self.found.linears)

    def read_experts(self, path: str) -> None:
        """Read the layers of fused experts. The file has one tensor for each layer of all experts."""
        block, experts = _BLOCK_NUMBER.search(path), self._empty.get_submodule(path)
        names = [f"blk.{block[1]}.{kind}" for kind in _EXPERT_LAYERS.values()] if block else []
        tensors = [
            self._file.tensors[f"{name}.weight"] for name in names if f"{name}.weight" in self._file.tensors
        ]
        if len(tensors) < len(_EXPERT_LAYERS):
            return
        self._used.update(tensor.name for tensor in tensors)
        if experts.has_bias:
            self._set_interleaved(path, "_bias", [self._bias(f"{name}.bias") for name in names])
        if not experts.is_concatenated and not all(tensor.type in _READ for tensor in tensors):
            self._set_interleaved(path, "", [self._plain(tensor).transpose(1, 2) for tensor in tensors])
            self._dequantized.update(tensor.type.name for tensor in tensors)
            return
        for layer, tensor in zip(_EXPERT_LAYERS, tensors, strict=True):
            each = tensor.data.reshape(tensor.shape[0], -1, tensor.data.shape[1])
            for number, data in enumerate(each):
                one = replace(tensor, shape=tensor.shape[1:], data=data)
                name = f"{path}.{number}.{layer}"
                if not self._stays_quantized(one, name, self.found.fused):
                    self.found.plain[f"{name}.weight"] = self._plain(one)
                    self._dequantized[tensor.type.name] += 1

    def _bias(self, name: str) -> Tensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            self._file.fail(f"tensor {name}: is missing")
        self._used.add(name)
        return self._plain(tensor)

    def _set_interleaved(self, path: str, suffix: str, parts: Sequence[Tensor]) -> None:
        """Write the tensors of gate, up and down as gpt-oss has them: gate and up take turns."""
        gate, up, down = parts
        self.found.plain[f"{path}.gate_up_proj{suffix}"] = torch.stack([gate, up], dim=-1).flatten(-2)
        self.found.plain[f"{path}.down_proj{suffix}"] = down.contiguous()

    def finish(self) -> None:
        """Refuse tensors that were not read. Log the dequantized types."""
        unknown = sorted(self._file.tensors.keys() - self._used - {*_UNUSED})
        if unknown:
            self._file.fail(f"tensor {unknown[0]}: {type(self._empty).__name__} has no such tensor")
        for kind, count in self._dequantized.most_common():
            if kind in _FLOATS:
                continue
            fields = self._file.path, count, kind, dtype_name(self._dtype)
            logger.info("%s: %d matrices of type %s are dequantized to %s", *fields)

    def _stays_quantized(self, tensor: GgufTensor, name: str, into: dict[str, QuantizedWeight]) -> bool:
        weight = quantized_weight(tensor, self._device)
        if weight is None:
            return False
        order = self._order(tensor)
        if order is not None:
            zeros = None if weight.zeros is None else weight.zeros[order]
            weight = replace(weight, codes=weight.codes[order], scales=weight.scales[order], zeros=zeros)
        into[name] = weight
        return True

    def _plain(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's values in the model's dtype."""
        if self._file.architecture.startswith("gemma") and tensor.name.endswith("norm.weight"):
            return (dequantized(tensor, torch.float32) - 1).to(self._dtype)  # llama.cpp stores w + 1
        values = dequantized(tensor, self._dtype)
        order = self._order(tensor)
        return values if order is None else values[order]

    def _order(self, tensor: GgufTensor) -> Tensor | None:
        """Return the places of the model's outputs in the tensor, or None if the order is equal.

        llama.cpp rotates neighbours and Transformers the halves of a head, so the outputs of queries and keys
        are interleaved in the architecture llama.
        """
        kind = tensor.name.split(".")[-2]
        if self._file.architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return None
        count = self._config.num_attention_heads if kind == "attn_q" else self._config.num_key_value_heads
        return torch.arange(tensor.shape[0]).view(count, -1, 2).transpose(1, 2).flatten()


def quantized_weight(
    tensor: GgufTensor, device: torch.device = torch.device("cpu")
) -> QuantizedWeight | None:
    """Return the weight of a matrix [outputs, inputs] as stored, or None if no format holds its type."""
    read = _READ.get(tensor.type)
    if read is None or len(tensor.shape) != 2:
        return None
    size, parse = read
    return parse(torch.from_numpy(tensor.data).to(device).unflatten(1, (-1, size)))


def dequantized(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a tensor of any type."""
    values = torch.empty(tensor.shape, dtype=dtype)
    rows = values.view(len(tensor.data), -1)
    count = max(1, _VALUES_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), count):
        piece = replace(tensor, data=tensor.data[start : start + count])
        rows[start : start + count] = _in_float32(piece)
    return values


def _in_float32(tensor: GgufTensor) -> Tensor:
    """Return the values [rows, inputs]."""
    weight = quantized_weight(tensor) if tensor.type in _WITHOUT_MINIMA else None
    if weight is not None:
        return weight.dequantized()
    return torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.type)))


class _Block(NamedTuple):
    """A block of 32 codes after a float16 scale. The first 16 codes are the low halves of the bytes from
    `codes` on; the others, the high ones. Codes without a minimum have their zero point in the middle.
    """

    codes: int
    fifth_bits: int | None = None
    has_minimum: bool = False

    def read(self, blocks: Tensor) -> QuantizedWeight:
        codes = _nibbles(blocks[..., self.codes :])
        format = CodeFormat.INT4
        if self.fifth_bits is not None:
            codes |= _bits(blocks[..., self.fifth_bits : self.fifth_bits + 4]) << 4
            format, codes = CodeFormat.INT8, codes.to(torch.int8)
        if self.has_minimum:
            return _with_minimum(format, codes.flatten(1), _half(blocks, 0), _half(blocks, 2))
        codes = codes if format is CodeFormat.INT4 else codes - 16
        return QuantizedWeight(format, codes.flatten(1), _half(blocks, 0))


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    """Read a float16 scale and 32 int8 codes."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return QuantizedWeight(CodeFormat.INT8, codes, _half(blocks, 0))


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    """Read two float16 factors, six-bit scales and minima of eight groups, and 256 codes."""
    return _with_minimum(CodeFormat.INT4, _k_codes(blocks[..., 16:]).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    """Read Q4_K with fifth bits: those of group g are bit g of the 32 bytes before the codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., 16:48, None] >> shifts) & 1
    codes = _k_codes(blocks[..., 48:]) | (fifth.transpose(-1, -2).flatten(-2) << 4)
    return _with_minimum(CodeFormat.INT8, codes.to(torch.int8).flatten(1), *_k_scales(blocks))


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    """Read a power of two (E8M0) and 32 codes of E2M1."""
    return QuantizedWeight(CodeFormat.MXFP4, _nibbles(blocks[..., 1:]).flatten(1), powers(blocks[..., 0]))


_READ = {
    GGMLQuantizationType.Q4_0: (18, _Block(2).read),
    GGMLQuantizationType.Q4_1: (20, _Block(4, has_minimum=True).read),
    GGMLQuantizationType.Q5_0: (22, _Block(6, 2).read),
    GGMLQuantizationType.Q5_1: (24, _Block(8, 4, has_minimum=True).read),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
    GGMLQuantizationType.Q4_K: (144, _q4_k),
    GGMLQuantizationType.Q5_K: (176, _q5_k),
    GGMLQuantizationType.MXFP4: (17, _mxfp4),
}
"""The types that stay quantized, with their bytes per block."""

_WITHOUT_MINIMA = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0)
"""Types whose values Torch computes faster than NumPy, to the same bits."""


def _with_minimum(format: CodeFormat, codes: Tensor, scales: Tensor, minima: Tensor) -> QuantizedWeight:
    """Return the weight with values `scales * codes + minima`.

    In a group with scale 0, all values are the minimum: its codes become 1, and its scale the minimum.
    """
    flat = scales == 0
    if flat.any():
        codes = torch.where(flat.repeat_interleave(_BLOCK, dim=1), codes.new_ones(()), codes)
        scales = torch.where(flat, minima, scales)
    zeros = torch.where(flat, 0.0, -minima / torch.where(scales == 0, 1.0, scales))
    return QuantizedWeight(format, codes, scales, zeros)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return a float16 of each block, as float32 [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the bytes' low halves, then their high halves, uint8 [..., 2 * bytes]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bytes' bits, lowest first, uint8 [..., 8 * bytes]."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)


def _k_codes(packed: Tensor) -> Tensor:
    """Return 256 four-bit codes; every 32 bytes have two groups of 32."""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of groups of 32, float32 [rows, 8 * blocks].

    Twelve bytes hold six bits of each: bytes 0 to 3 the first four groups' scales, bytes 4 to 7 their minima.
    The other groups have the low four bits in bytes 8 to 11, and the high two in the top bits of bytes 0 to
    7.
    """
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    factors = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return (factors[0] * scales).flatten(1), -(factors[1] * minima).flatten(1)
