"""GPTQ's layout (AutoGPTQ, GPTQModel): int32 words along the inputs, [in_features * bits / 32, out_features].

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
Version 1 stores zero points minus one, version 2 unchanged. `g_idx` has each input's group: `desc_act`
quantizes inputs in another order than the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.quantization import words
from engine.quantization.stored import GROUP_SIZES, WHOLE_ROW, StoredLayer, choice, order_by_group
from engine.quantization.weight import INT4_ZERO, CodeFormat, QuantizedWeight
from protocol.errors import UnsupportedModelError

_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one in each code of a word. GPTQModel subtracts it from whole words, and so borrows across codes."""
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class Gptq:
    bits: int
    group_size: int
    desc_act: bool = False
    version: int = 1
    symmetric: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Gptq:
        bits = choice(config, "bits", tuple(_ONES))
        group_size = choice(config, "group_size", (*GROUP_SIZES, WHOLE_ROW))
        field = "checkpoint_format" if "checkpoint_format" in config else "format"
        version = _VERSIONS[choice(config, field, tuple(_VERSIONS), "gptq")]
        choice(config, "pack_dtype", ("int32",), "int32")
        special = [name for name in config.get("dynamic") or () if not name.startswith("-:")]
        if special:
            raise UnsupportedModelError(
                f"quantization_config: dynamic has options of its own for {special[0]!r}: not supported"
            )
        desc_act, symmetric = (
            choice(config, field, (True, False), default)
            for field, default in (("desc_act", False), ("sym", True))
        )
        return cls(bits, group_size, desc_act, version, symmetric)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.symmetric,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "pack_dtype": "int32",
            "modules_to_not_convert": list(unquantized) or None,
        }

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        return not tensors.keys().isdisjoint(("qweight", "qzeros", "scales", "g_idx"))

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        if "qweight" not in tensors:
            return None
        height, rows = tensors["qweight"].shape
        return rows, height * 32 // self.bits

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        groups = layer.in_features // layer.group_size(self.group_size)
        per_word = 32 // self.bits
        height, width = -(-layer.in_features // per_word), -(-layer.out_features // per_word)
        stored = layer.take("qweight", (torch.int32,), (height, layer.out_features))
        codes = words.unpack(stored.T, self.bits)[:, : layer.in_features]
        zeros = self._zeros(layer, groups, width)
        scales = layer.scales("scales", (groups, layer.out_features)).T.contiguous()
        permutation = self._permutation(layer, groups)
        if permutation is not None:
            codes = codes[:, permutation]
        if self.bits == 8:
            if zeros is not None:
                raise layer.wrong(
                    "qzeros", f"has zero points of 8 bits other than {words.INT8_ZERO}: sym must be true"
                )
            return QuantizedWeight(CodeFormat.INT8, words.move_zero(codes), scales, None, permutation)
        return QuantizedWeight(CodeFormat.INT4, codes.contiguous(), scales, zeros, permutation)

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return tensors with float16 scales. Some readers of version 1 read the zero point 0 as 16."""
        codes, zeros = weight.codes, weight.zeros
        if weight.format is CodeFormat.INT8:
            codes = words.move_zero(codes)
        if zeros is None:
            zeros = torch.full_like(weight.scales, INT4_ZERO if self.bits == 4 else words.INT8_ZERO)
        group_of = torch.arange(codes.shape[1], dtype=torch.int32) // weight.group_size
        if weight.permutation is not None:
            order = weight.permutation.argsort()
            codes, group_of = codes[:, order], group_of[order]
        stored_zeros = words.pack(zeros.to(torch.uint8).T, self.bits)
        if self.version == 1:
            stored_zeros -= _ONES[self.bits]
        return {
            "qweight": words.pack(codes, self.bits).T.contiguous(),
            "qzeros": stored_zeros,
            "scales": weight.scales.T.to(torch.float16).contiguous(),
            "g_idx": group_of,
        }

    def _zeros(self, layer: StoredLayer, groups: int, width: int) -> Tensor | None:
        stored = layer.take("qzeros", (torch.int32,), (groups, width))
        if self.version == 1:
            stored = stored + _ONES[self.bits]
        zeros = words.unpack(stored, self.bits)[:, : layer.out_features].T
        usual = INT4_ZERO if self.bits == 4 else words.INT8_ZERO
        return None if (zeros == usual).all() else zeros.to(torch.float32).contiguous()

    def _permutation(self, layer: StoredLayer, groups: int) -> Tensor | None:
        group_of = layer.tensors.get("g_idx")
        if not self.desc_act and (group_of is None or group_of.numel() == 0):
            return None
        return order_by_group(layer, "g_idx", groups)
