"""Products by Marlin, vLLM's kernel for 4-bit weights and 16-bit inputs.

Marlin repacks weights that are packed as GPTQ's are. It reads scales, zero points and biases in the order in
which its threads hold outputs, and takes scales in the model's dtype.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from engine.devices.cuda.library_products import MARLIN, Library, LibraryProduct
from engine.quantization.formats import pack
from engine.quantization.weight import CodeFormat, QuantizedWeight

_GROUPS = (32, 64, 128)
_INPUTS, _OUTPUTS = 128, 64
"""The numbers of which a weight's inputs and outputs are multiples."""
_BITS = 4


class MarlinProduct(LibraryProduct):
    """A 4-bit weight: codes int32 [inputs / 16, 2 * outputs], scales in the inputs' dtype, and zero points,
    eight to an int32 [groups, outputs / 8].
    """

    library = MARLIN

    @classmethod
    def library_of(cls, weight: QuantizedWeight) -> Library | None:
        outputs, inputs = weight.codes.shape
        groups = weight.scales.shape[1]
        fits = weight.format is CodeFormat.INT4 and weight.permutation is None
        fits = fits and inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0
        fits = fits and (groups == 1 or weight.group_size in _GROUPS)
        return MARLIN if fits and (weight.zeros is None or _are_codes(weight.zeros)) else None

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Self:
        outputs, inputs = weight.codes.shape
        codes = pack(weight.codes, _BITS).t().contiguous()
        sizes = {"size_k": inputs, "size_n": outputs, "num_bits": _BITS, "is_a_8bit": False}
        no_order = codes.new_empty(0)
        repacked: Tensor = _call("gptq_marlin_repack", b_q_weight=codes, perm=no_order, **sizes)
        scales = weight.scales.t().to(dtype)
        # Without groups scales apply to sums, which threads hold in another order than weights.
        scales = _as_sums(scales) if len(scales) == 1 else _as_weights(scales)
        zeros = None if weight.zeros is None else _packed_zeros(weight.zeros.t())
        return cls(
            inputs, repacked, scales, zeros, None if bias is None else _as_sums(bias.detach().to(dtype))
        )

    def __call__(self, rows: Tensor) -> Tensor:
        made: Tensor = _call(
            "marlin_gemm",
            a=rows,
            c_or_none=None,
            b_q_weight=self.codes,
            b_bias_or_none=self.bias,
            b_scales=self.scales,
            a_scales=None,
            global_scale=None,
            b_zeros_or_none=self.zeros,
            g_idx_or_none=None,
            perm_or_none=None,
            workspace=_workspace(rows.device),
            b_type_id=_type_id(has_zeros=self.zeros is not None),
            size_m=len(rows),
            size_n=self.outputs,
            size_k=rows.shape[1],
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )
        return made


def _are_codes(zeros: Tensor) -> bool:
    """Return whether zero points are integers of four bits."""
    return bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 1 << _BITS)).all())


def _as_weights(rows: Tensor) -> Tensor:
    """Reorder outputs [..., outputs], 64 at a time, as threads hold them with weights."""
    return rows.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3).contiguous()


def _as_sums(rows: Tensor) -> Tensor:
    """Reorder outputs [..., outputs], 32 at a time, as threads hold them with sums."""
    return rows.unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-4).contiguous()


def _packed_zeros(zeros: Tensor) -> Tensor:
    """Reorder zero points [groups, outputs]; a word has four of even numbers, then four of odd ones."""
    words = _as_weights(zeros).unflatten(-1, (-1, 4, 2)).transpose(-1, -2)
    return pack(words.flatten(1).to(torch.uint8), _BITS)


@cache
def _operator(name: str) -> Any:
    importlib.import_module("vllm._custom_ops")  # registers the operators
    return getattr(torch.ops._C, name).default


@cache
def _names(name: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in _operator(name)._schema.arguments)


def _call(name: str, **arguments: Any) -> Any:
    """Call an operator of vLLM's with those `arguments` that it has; later versions have dropped some."""
    return _operator(name)(**{each: arguments[each] for each in _names(name)})


@cache
def _type_id(*, has_zeros: bool) -> int:
    types = importlib.import_module("vllm.scalar_type").scalar_types
    number: int = (types.uint4 if has_zeros else types.uint4b8).id
    return number


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return zeros, one for each multiprocessor, which the kernel leaves."""
    count = 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(count, dtype=torch.int32, device=device)
