"""AWQ's `gemm` layout (AutoAWQ): int4 with zero points, in int32 words [in_features, out_features / 8].

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration". A word
holds eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.quantization import words
from engine.quantization.stored import GROUP_SIZES, WHOLE_ROW, StoredLayer, choice
from engine.quantization.weight import INT4_ZERO, CodeFormat, QuantizedWeight

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Each output's place in its word of eight: the inverse of `_ORDER`."""


@dataclass(frozen=True)
class Awq:
    group_size: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Awq:
        choice(config, "bits", (_BITS,))
        choice(config, "version", ("gemm", "GEMM"), "gemm")
        choice(config, "zero_point", (True,), True)
        return cls(choice(config, "group_size", (*GROUP_SIZES, WHOLE_ROW)))

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": _BITS,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(unquantized) or None,
        }

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        return not tensors.keys().isdisjoint(("qweight", "qzeros", "scales"))

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        if "qweight" not in tensors:
            return None
        columns, width = tensors["qweight"].shape
        return width * 8, columns

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        size = layer.group_size(self.group_size)
        groups, width = layer.in_features // size, layer.out_features // 8
        codes = layer.take("qweight", (torch.int32,), (layer.in_features, width))
        zeros = _unpack(layer.take("qzeros", (torch.int32,), (groups, width)))
        scales = layer.scales("scales", (groups, layer.out_features))
        return QuantizedWeight(
            CodeFormat.INT4,
            _unpack(codes),
            scales.T.contiguous(),
            None if (zeros == INT4_ZERO).all() else zeros.to(torch.float32),
        )

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the layer's tensors, scales in float16. Outputs must be a multiple of 8, not permuted."""
        assert weight.format is CodeFormat.INT4 and weight.permutation is None
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full_like(weight.scales, INT4_ZERO)
        return {
            "qweight": _pack(weight.codes),
            "qzeros": _pack(zeros.to(torch.uint8)),
            "scales": weight.scales.T.to(torch.float16).contiguous(),
        }


def _unpack(stored: Tensor) -> Tensor:
    """Return uint8 [out_features, columns] from int32 [columns, out_features / 8]."""
    codes = words.unpack(stored, _BITS).view(len(stored), -1, 8)
    return codes[:, :, _PLACES].flatten(1).T.contiguous()


def _pack(codes: Tensor) -> Tensor:
    ordered = codes.T.reshape(codes.shape[1], -1, 8)[:, :, _ORDER]
    return words.pack(ordered.flatten(1), _BITS)
