"""Quantized linear layers with weights packed for our kernel (`quantized.h`), for bfloat16 on the CPU.

Few rows take as long as reading the codes. A row's result has the same bits in every batch. With an
`input_group`, rows are rounded to int8 (`rounded.h`): integers are multiplied twice as fast as bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.linear.packed import (
    PackedLinear,
    QuantizedArgs,
    joined,
    library,
    linear_of,
    operator,
    pack,
    packed_rows,
    rows_of,
    unpacked,
)
from engine.linear.quantized import QuantizedLinear
from engine.quantization.weight import CodeFormat, QuantizedWeight, same_order
from native.threads import gomp_parallel

FORMATS = (CodeFormat.INT8, CodeFormat.INT4, CodeFormat.FP8, CodeFormat.MXFP4)
"""The formats in the order of the enum in `codes.h`."""

_BITS = {CodeFormat.INT8: 8, CodeFormat.INT4: 4, CodeFormat.FP8: 8, CodeFormat.MXFP4: 4}
_DEPTH, _SLICE = 32, 128
"""The kernel sums a multiple of `_DEPTH` inputs, and at most `_SLICE`, before it scales the sum."""


def fits(weight: QuantizedWeight) -> bool:
    """Return whether the kernel can multiply by the weight."""
    inputs, group = weight.codes.shape[1], weight.group_size
    whole_runs = group == inputs or group <= _SLICE or group % _SLICE == 0
    return inputs % _DEPTH == 0 and group % _DEPTH == 0 and whole_runs


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight. `words` is int16 [out / 64, in / 2c, 64, 2] with c codes in each word; `scales`, and
    `minima` if there are zero points, the values of code 0, are [out / 64, groups, 64, 1]: both float16 if
    that is exact, else float32. `inputs` is int32 [in], or None if codes are in the inputs' order.
    `input_group` is the same as in `QuantizedWeight`.
    """

    format: CodeFormat
    words: Tensor
    scales: Tensor
    minima: Tensor | None
    inputs: Tensor | None
    out_features: int
    input_group: int = 0

    @classmethod
    def of(cls, weight: QuantizedWeight) -> PackedWeight:
        """Pack a weight for which `fits` holds."""
        values = [weight.scales] if weight.zeros is None else [weight.scales, -weight.scales * weight.zeros]
        dtype = torch.float16 if all(map(_are_halves, values)) else torch.float32
        scales, *minima = (pack(each.to(dtype), 1) for each in values)
        return cls(
            weight.format,
            pack(_words(weight)),
            scales,
            minima[0] if minima else None,
            None if weight.permutation is None else weight.permutation.int(),
            len(weight.codes),
            weight.input_group,
        )

    @property
    def in_features(self) -> int:
        return _num_inputs(self.words, self.format)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.words, self.scales, self.minima, self.inputs

    def is_like(self, other: PackedWeight) -> bool:
        """Return whether both can be joined into one weight of the same inputs."""
        return (
            same_order(self.inputs, other.inputs)
            and self.format is other.format
            and self.input_group == other.input_group
            and (self.minima is None) == (other.minima is None)
            and self.scales.shape[1] == other.scales.shape[1]
        )

    def rows(self, rows: Sequence[range]) -> PackedWeight:
        return replace(
            self,
            words=packed_rows(self.words, rows),
            scales=packed_rows(self.scales, rows),
            minima=None if self.minima is None else packed_rows(self.minima, rows),
            out_features=sum(map(len, rows)),
        )

    def chosen(self, outputs: Tensor) -> PackedWeight:
        """Return a weight with only the outputs `outputs`, int64 [n], in this order."""
        return replace(
            self,
            words=pack(unpacked(self.words)[outputs]),
            scales=pack(unpacked(self.scales)[outputs], 1),
            minima=None if self.minima is None else pack(unpacked(self.minima)[outputs], 1),
            out_features=len(outputs),
        )

    def is_table(self) -> bool:
        """Return whether `bfloat16_rows` can read it."""
        return self.format is CodeFormat.INT8 and self.minima is None and self.inputs is None

    def bfloat16_rows(self, first: int, end: int) -> Tensor:
        """Return the weights of these outputs, [end - first, in_features], of a table."""
        outputs = torch.arange(first, end)
        out = torch.empty((end - first, self.in_features), dtype=torch.bfloat16)
        args = self.args(None)
        read = library().tandem_quantized_rows
        read(ctypes.addressof(args), outputs.data_ptr(), len(outputs), out.data_ptr())
        return out

    def copied(self, copy: Callable[[Tensor], Tensor]) -> PackedWeight:
        minima = None if self.minima is None else copy(self.minima)
        return replace(self, words=copy(self.words), scales=copy(self.scales), minima=minima)

    def args(self, bias: Tensor | None) -> QuantizedArgs:
        """Return the kernel's arguments. Their tensors must outlive them."""
        numbers = FORMATS.index(self.format), self.input_group, self.out_features
        return packed_args((*self.tensors, bias), numbers)


def _are_halves(values: Tensor) -> bool:
    """Return whether all values are float16 numbers but for float32's rounding of a zero point."""
    return bool(((values.half().float() - values).abs() <= values.abs() * 2**-23).all())


def join(weights: Sequence[PackedWeight]) -> PackedWeight:
    first, outputs = weights[0], [weight.out_features for weight in weights]
    if len(weights) == 1:
        return first
    minima = [weight.minima for weight in weights if weight.minima is not None]
    return replace(
        first,
        words=joined([weight.words for weight in weights], outputs),
        scales=joined([weight.scales for weight in weights], outputs),
        minima=joined(minima, outputs) if minima else None,
        out_features=sum(outputs),
    )


def packed_args(parts: Sequence[Tensor | None], numbers: Sequence[int]) -> QuantizedArgs:
    """Return the kernel's arguments. `parts` are words, scales, minima, inputs and bias; `numbers` the index
    in `FORMATS`, the input group and the number of outputs.
    """
    (words, scales, *_), (format, input_group, out_features) = parts, numbers
    assert words is not None and scales is not None
    in_features = _num_inputs(words, FORMATS[format])
    group = in_features // scales.shape[1]
    addresses = (None if each is None else each.data_ptr() for each in parts)
    return QuantizedArgs(*addresses, in_features, out_features, group, scales.itemsize, format, input_group)


def _num_inputs(words: Tensor, format: CodeFormat) -> int:
    return words.shape[1] * 2 * (16 // _BITS[format])


_TO_THE_TOP = sum(1 << 48 - 12 * place for place in range(4))
"""The factor that moves the code in byte 2n of an int64 to bits 48 + 4n."""


def _words(weight: QuantizedWeight) -> Tensor:
    """Return int16 [out_features, in_features / c] words: of 2c codes the even ones, then the odd ones."""
    codes = weight.codes.contiguous()
    if _BITS[weight.format] == 8:  # swap the middle two of four bytes
        four = codes.view(torch.int32)
        words = four & -0xFFFF01
        words |= (four >> 8).bitwise_and_(0xFF00)  # in place, since new memory costs more than the operation
        words |= (four << 8).bitwise_and_(0xFF0000)
    else:
        eight = codes.view(torch.int64)
        words = torch.stack([_even_codes(eight), _even_codes(eight >> 8)], dim=-1).flatten(1)
    return words.view(torch.int16)


def _even_codes(eight: Tensor) -> Tensor:
    """Return the codes in the even bytes of each int64, packed in one int16."""
    gathered = (eight & 0x000F000F000F000F).mul_(_TO_THE_TOP)
    return gathered.view(torch.int16)[:, 3::4]


def _run(x: Tensor, parts: Sequence[Tensor | None], numbers: Sequence[int]) -> Tensor:
    args = packed_args(parts, numbers)
    if not x.is_contiguous():
        x = x.contiguous()
    *batch, in_features = x.shape
    if in_features != args.in_features or x.dtype is not torch.bfloat16:
        raise ValueError(f"not a bfloat16 input of {args.in_features} features: {x.dtype} {tuple(x.shape)}")
    out = torch.empty((*batch, args.out_features), dtype=torch.bfloat16)
    library().tandem_quantized_linear(
        x.data_ptr(),
        ctypes.addressof(args),
        out.data_ptr(),
        math.prod(batch),
        torch.get_num_threads(),
        gomp_parallel(),
    )
    return out


_quantized_linear = operator(
    "quantized_linear(Tensor x, Tensor?[] parts, int[] numbers) -> Tensor",
    _run,
    lambda x, parts, numbers: x.new_empty((*x.shape[:-1], numbers[-1])),
)


class PackedQuantizedLinear(nn.Module):
    """A quantized layer with packed weights, for bfloat16 inputs."""

    words: Tensor
    scales: Tensor
    minima: Tensor | None
    inputs: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        """Make the layer. `bias` is bfloat16 [out_features]."""
        super().__init__()
        self.format, self.input_group = weight.format, weight.input_group
        self.in_features, self.out_features = weight.in_features, weight.out_features
        for name in ("words", "scales", "minima", "inputs"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed(self) -> PackedWeight:
        parts = self.words, self.scales, self.minima, self.inputs
        return PackedWeight(self.format, *parts, self.out_features, self.input_group)

    def rows(self, rows: Sequence[range]) -> PackedQuantizedLinear:
        bias = None if self.bias is None else rows_of(self.bias, rows)
        return PackedQuantizedLinear(self.packed.rows(rows), bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.words, self.scales, self.minima, self.inputs, self.bias]
        numbers = [FORMATS.index(self.format), self.input_group, self.out_features]
        return _quantized_linear(x, parts, numbers)


def pack_quantized_linears(model: nn.Module) -> None:
    """Replace the quantized layers of a bfloat16 model, freeing their weights. A layer that the kernel cannot
    multiply becomes a plain layer with the dequantized weight.
    """
    for path, linear in _quantized_linears(model):
        if fits(linear.quantized):
            model.set_submodule(path, PackedQuantizedLinear(packed(linear.quantized), linear.bias))
        else:
            model.set_submodule(path, linear.plain(torch.bfloat16))


def packed(weight: QuantizedWeight) -> PackedWeight:
    """Pack a weight for which `fits` holds. Its inputs are rounded only where that is faster."""
    return PackedWeight.of(weight if _rounded_inputs_pay() else replace(weight, input_group=0))


@functools.cache
def _rounded_inputs_pay() -> bool:
    return bool(library().tandem_rounded_inputs_pay())


def dequantize_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the model's quantized layers by plain layers with the dequantized weights."""
    for path, linear in _quantized_linears(model):
        model.set_submodule(path, linear.plain(dtype))


def _quantized_linears(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the model's quantized layers one by one, by path: each may be replaced before the next."""
    for path in [path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]:
        linear = model.get_submodule(path)
        assert isinstance(linear, QuantizedLinear)
        yield path, linear


def with_outputs(linear: nn.Module, outputs: Tensor) -> nn.Module:
    """Return a layer with only these outputs (int64 [n], in this order), in its own memory.

    Packed weights stay packed if they are quantized. Raises TypeError for a layer that is not linear.
    """
    bias = getattr(linear, "bias", None)
    bias = None if bias is None else bias[outputs]
    if isinstance(linear, PackedQuantizedLinear):
        return PackedQuantizedLinear(linear.packed.chosen(outputs), bias)
    if isinstance(linear, QuantizedLinear):
        weight = linear.quantized
        parts = {"codes": weight.codes[outputs], "scales": weight.scales[outputs]}
        zeros = None if weight.zeros is None else weight.zeros[outputs]
        return QuantizedLinear(replace(weight, zeros=zeros, **parts), bias)
    if isinstance(linear, PackedLinear):
        return linear_of(unpacked(linear.weight)[outputs], bias)
    if type(linear) is nn.Linear:
        return linear_of(linear.weight[outputs], bias)
    raise TypeError(f"{type(linear).__name__} is no linear layer")
